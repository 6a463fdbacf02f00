"""The tools of a chat on the full screen: the answers to a call that asks, and the page of servers and tools."""

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from app.screens.engine_actions import EngineActions
from app.tools.form import form_of
from app.tools.toolbox import NONE, Toolbox
from engine.errors import UsageError
from engine.formats.tools.forms import ToolForm
from widgets.chat.tool_question import ANSWERS
from widgets.page import Frame, Page
from widgets.text import one_line


class ToolsPage(Page[None]):
    DEFAULT_CSS = """
    ToolsPage > Frame { height: auto; padding: 1 2 0 2; }
    ToolsPage VerticalScroll { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    """
    BINDINGS = [Binding("escape,q,enter", "dismiss", "Close", priority=True)]

    def __init__(self, toolbox: Toolbox) -> None:
        super().__init__()
        self._toolbox = toolbox

    def compose(self) -> ComposeResult:
        rows = []
        for name, state in self._toolbox.states.items():
            style = "bold $text-warning" if state.problem else "bold"
            rows.append(Content.assemble((f"{name}  ", style), state.text))
            for tool in state.tools:
                rows.append(Content.assemble("  ", (tool.name, "$text-primary"), f"  {one_line(tool.about)}"))
        with Frame("Tools", "Up and Down scroll · Esc closes", "Esc closes"), VerticalScroll():
            yield Static(Content("\n").join(rows))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


class ToolActions(EngineActions):
    """A part of `ChatApp`."""

    BINDINGS = [Binding(key, f"permit('{answer}')", show=False) for key, answer, _ in ANSWERS]

    def action_permit(self, answer: str) -> None:
        self.column.question.action_answer(answer)

    def tool_form(self) -> ToolForm | None:
        """How the model in use writes calls. Raises UsageError for a comparison."""
        if self.is_comparing:
            raise UsageError("While llama.cpp is compared, there are no tools.")
        return form_of(self.setup.model_path if self.setup else None)

    @work(group="tools", exclusive=True)
    async def show_tools(self, argument: str) -> None:
        toolbox, column = self.session.tools.toolbox, self.column
        if not toolbox.servers:
            column.notice(NONE, seconds=30)
            return
        column.notice("Starting the servers of tools")
        await (toolbox.again() if argument == "again" else toolbox.start())
        column.notice("")
        await self.push_screen_wait(ToolsPage(toolbox))
