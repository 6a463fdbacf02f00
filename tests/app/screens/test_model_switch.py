"""Another model in mid-conversation, chosen in the chat: real files, engines from a script."""

import pytest
from msgspec.structs import replace

from app.chat import model_list
from app.chat.settings import Settings, last_model
from app.screens.engine_setup import EngineSetup
from app.screens.pages import models as screen_module
from app.screens.pages.models import ModelsScreen
from engine.catalog.downloads import download
from engine.catalog.names import KnownModel, parse
from engine.formats.templates.prompt import tokens_in
from engine.protocol.events import Chat, EngineOptions, Failed, Message
from presets import GUIDE
from tests.app.driver import chat
from tests.app.fake_engine import READY, STARTED, TOO_LONG, FakeEngine, reply
from tests.catalog.fixtures import fake_hub
from tests.generated_model import write
from tests.thorough import thorough

__all__ = ["fake_hub"]

BROKEN = Failed(kind="model", message="other.gguf is damaged.", hint="Download it again.")


@pytest.fixture
def hub(fake_hub, tmp_path, monkeypatch):
    fake_hub.files = {"noise-F16.gguf": write(tmp_path / "f16.gguf", quant="F16", context=512).read_bytes()}
    known = [KnownModel("noise", fake_hub.repository, "F16", "llama")]
    for module in ("engine.catalog.names", "app.chat.model_list"):
        monkeypatch.setattr(f"{module}.known_models", lambda: known)
    monkeypatch.setattr(screen_module, "POLL_S", 0.02)
    monkeypatch.setattr(screen_module, "memory_bytes", lambda backend: 8_000_000_000)
    return fake_hub


@pytest.fixture
def first(home):
    return write(home / "first.gguf", architecture="qwen3")


@pytest.fixture
def setup(first):
    """Makes a EngineSetup whose next engine starts as told; what it was asked to make is in `made`."""

    def setup(*replies, start=STARTED, context=2048):
        made = []

        def make(options):
            made.append((options, FakeEngine(*replies, start=start)))
            return made[-1][1]

        options = EngineOptions(model_path=str(first), backend="CPU", context_length=context)
        setup = EngineSetup(
            options,
            make=make,
            unusable_because=lambda backend: "",
            settings=Settings(models={"one": str(first)}),
        )
        setup.made = made
        return setup

    return setup


async def choose(user, name):
    await user.press("ctrl+l")
    await user.until(lambda: isinstance(user.app.screen, ModelsScreen) and user.app.screen.models)
    user.app.screen.field.value = name
    await user.pilot.pause()
    await user.press("enter")
    await user.until(lambda: not isinstance(user.app.screen, ModelsScreen), "the chat")


async def test_the_conversation_goes_on_with_the_other_model(hub, setup, first, history):
    other = download(parse("noise"))
    setup = setup(reply("From the other."))
    async with chat(FakeEngine(reply("From the first.")), history, setup=setup) as user:
        await user.idle()
        await user.say("Hello")
        await user.idle()
        await choose(user, "noise")
        await user.sees("noise answers now")
        [(options, engine)] = setup.made
        assert (options.model_path, options.context_at_most) == (str(other), True)  # as it was trained for
        assert user.app.session.engine is engine and user.engine.closed == 1
        assert setup.model_path == other and last_model() == "noise"
        turns = (Message(role="user", content="Hello"), Message(role="assistant", content="From the first."))
        expected = tokens_in(Chat(messages=turns), other)
        await user.until(lambda: user.app.session.status.snapshot().context_used == expected)
        await user.say("And now?")
        await user.sees("From the other.")
        assert engine.prompts() == [
            [("user", "Hello"), ("assistant", "From the first."), ("user", "And now?")]
        ]


async def test_a_command_that_names_a_model_goes_over_to_it(hub, setup, history):
    other = download(parse("noise"))
    setup = setup(reply("From the other."))
    async with chat(FakeEngine(), history, setup=setup) as user:
        await user.idle()
        await user.say("/model noise")
        await user.sees("noise answers now")
        assert setup.model_path == other and not isinstance(user.app.screen, ModelsScreen)
        await user.say("/model noise")
        await user.sees("noise is in use already")
        await user.say("/model nois")
        await user.until(lambda: isinstance(user.app.screen, ModelsScreen), "what is not sure is asked")
        assert user.app.screen.field.value == "nois"


async def test_a_prompt_that_is_too_long_alone_can_only_have_a_longer_context(hub, setup, history):
    setup = setup(reply("Read."))
    async with chat(FakeEngine([TOO_LONG]), history, setup=setup, initial_prompt="Long") as user:
        await user.sees("The prompt alone is too long")
        await user.idle()
        await user.press("ctrl+g")
        await user.sees("The longest context")
        assert "summary" not in user.screen() and "oldest" not in user.screen()
        await user.press("enter")
        await user.sees("Read.")
        assert setup.made[0][0].context_length == "max"


@thorough
async def test_a_full_context_goes_on_with_the_longest_one(hub, setup, first, history):
    setup = setup(reply(" more."))
    engine = FakeEngine(reply("So much", reason="length", prompt_n=8190))
    async with chat(engine, history, setup=setup, initial_prompt="Tell me all") as user:
        await user.sees("Ctrl+G offers how to go on")
        await user.idle()
        await user.press("ctrl+g", "down", "down", "enter")
        await user.sees("So much more.")
        [(options, engine)] = setup.made
        assert options.context_length == setup.options.context_length == "max"
        assert setup.command_line["context_length"] == "max", "with other presets, too"
        assert engine.prompts() == [[("user", "Tell me all"), ("assistant", "So much")]]
        await user.idle()
        await user.press("ctrl+p", *"longest", "enter")
        await user.sees("There is no memory for a longer context")


async def test_no_longer_context_is_offered_than_the_model_was_trained_for(history):
    whole = replace(READY, model=replace(READY.model, trained_context=READY.context_length))
    full = reply("So much", reason="length", prompt_n=8190)
    async with chat(FakeEngine(full, start=[whole]), history, initial_prompt="Tell me all") as user:
        await user.sees("Ctrl+G offers how to go on")
        await user.idle()
        await user.press("ctrl+g")
        await user.sees("Leave out the oldest turns")
        assert "The longest context" not in user.screen()


async def test_a_first_model_that_does_not_load_can_be_replaced(hub, setup, first, history):
    other = download(parse("noise"))
    setup = setup(reply("From the other."))
    async with chat(FakeEngine(start=[BROKEN]), history, setup=setup) as user:
        await user.sees(
            "other.gguf is damaged. Download it again. Ctrl+L chooses another model, such as orin-guide"
        )
        await choose(user, "noise")
        await user.sees("noise answers now")
        assert setup.model_path == other
        await user.say("Hello")
        await user.sees("From the other.")


async def test_a_model_that_does_not_start_changes_nothing(hub, setup, first, history):
    download(parse("noise"))
    setup = setup(start=[BROKEN])
    async with chat(FakeEngine(reply("Still here.")), history, setup=setup) as user:
        await user.idle()
        await choose(user, "noise")
        await user.sees("noise did not start: other.gguf is damaged.")
        assert setup.model_path == first and last_model() == ""
        await user.say("Hello")
        await user.sees("Still here.")


@thorough
async def test_choosing_the_model_in_use_does_nothing(hub, setup, history):
    setup = setup()
    async with chat(FakeEngine(), history, setup=setup) as user:
        await user.idle()
        await choose(user, "one")
        assert setup.made == []


@thorough
async def test_a_download_ends_beside_the_chat(hub, setup, history):
    hub.files["noise-F16.gguf"] *= 3
    hub.pause_s = 0.01
    async with chat(FakeEngine(reply("Meanwhile.")), history, setup=setup()) as user:
        await user.idle()
        await user.press("ctrl+l")
        await user.until(lambda: isinstance(user.app.screen, ModelsScreen) and user.app.screen.models)
        user.app.screen.field.value = "noise"
        await user.pilot.pause()
        await user.press("enter")
        await user.sees("Esc lets it go on")
        await user.press("escape")
        await user.say("Hello")
        await user.sees("Meanwhile.")
        hub.pause_s = 0
        await user.sees("noise is here · Ctrl+L chooses it")


async def test_a_chat_without_a_setup_says_so(home, history):
    async with chat(FakeEngine(), history) as user:
        await user.press("ctrl+l")
        assert "no other models" in user.notice()
        assert model_list.on_this_machine() == []


async def test_the_built_in_model_says_what_it_is_where_it_is_in_use(history):
    guide = replace(READY, model=replace(READY.model, name=GUIDE))
    async with chat(FakeEngine(start=[STARTED[0], None, guide]), history=history) as user:
        await user.sees("loading · ")  # which nothing hides
        user.engine.release()
        await user.sees("a small model that is built in")
        await user.sees("Ctrl+L has larger ones")
    async with chat(FakeEngine(), history=history) as user:
        await user.sees("ready")
        assert "built in" not in user.screen()
