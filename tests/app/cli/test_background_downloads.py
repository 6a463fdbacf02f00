"""Downloads beside a screen."""

from app.chat.download import Download, progress_text
from engine.catalog import cache
from engine.catalog.names import HubModel, parse
from engine.catalog.progress import Progress
from tests.app.cli.test_models import NAME, hub
from tests.catalog.fixtures import fake_hub
from tests.waiting import wait_until

__all__ = ["fake_hub", "hub"]


def test_a_download_in_the_background_can_be_stopped_and_goes_on(hub, home):
    hub.files["model-Q8_0.gguf"] *= 4
    hub.pause_s = 0.01
    source = parse(NAME)
    first = Download(NAME, source)
    wait_until(lambda: first.progress.done_bytes > 50_000)
    first.stop()
    wait_until(lambda: first.is_over)
    assert first.path is None and first.error is None
    second = Download(NAME, source)
    wait_until(lambda: second.is_over)
    assert second.path == cache.find(source)


def test_a_download_in_the_background_tells_its_error(fake_hub):
    download = Download("nothing", HubModel("user/nothing"))
    wait_until(lambda: download.is_over)
    assert download.path is None and "does not exist" in download.error.message


def test_progress_in_words():
    assert progress_text(Progress("m.gguf", 0, 0, note="asking the hub")) == "m.gguf: asking the hub"
    assert (
        progress_text(Progress("m.gguf", 312_000_000, 636_000_000, 41_200_000.0))
        == "m.gguf: 312 MB of 636 MB, 49%, 41.2 MB/s, 7.9 s left"
    )
    assert progress_text(Progress("m.gguf", 5_000_000, 0, 1e6)) == "m.gguf: 5.00 MB, 1.00 MB/s"
