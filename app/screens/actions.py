"""The actions of the chat, in one table that makes the keys, the command palette and the help."""

from typing import NamedTuple


class Action(NamedTuple):
    """`name` is the method `action_<name>` of the application. A key must pass SSH, tmux (which takes Ctrl+B) and a
    terminal without an extended keyboard protocol, and must have no use in the prompt."""

    key: str
    name: str
    title: str
    help: str
    second: str = ""

    @property
    def keys(self) -> str:
        """All keys, as Textual's bindings name them. `second`: a key that works too, where a terminal sends it."""
        return ",".join(filter(None, (self.key, self.second)))


ACTIONS = (
    Action("escape", "stop", "Stop", "Stop the reply; what has arrived is kept"),
    Action("ctrl+r", "regenerate", "Regenerate", "Answer the last prompt again, in place of the reply"),
    Action("ctrl+g", "go_on", "Go on", "Continue the last reply where it ended"),
    Action(
        "f2",
        "edit",
        "Edit last prompt",
        "Bring the last prompt back, to change and resend it; again: the one before",
    ),
    Action("f3", "copy_reply", "Copy reply", "Copy the last reply, as Markdown"),
    Action("f4", "copy_code", "Copy code block", "Copy the last code block"),
    Action(
        "alt+u", "read_again", "Read files again", "Name the files that have changed since they were sent"
    ),
    Action("ctrl+t", "toggle_thinking", "Show or fold thinking", "Unfold what the model thought, or fold it"),
    Action("alt+g", "tint", "Tint guesses", "Tint the tokens that speculation guessed right, or no longer"),
    Action("ctrl+n", "new_chat", "New chat", "Start an empty chat; this one stays in the past chats"),
    Action("ctrl+o", "past_chats", "Past chats", "Find, open, rename or delete earlier conversations"),
    Action("ctrl+f", "find", "Find", "Search in this chat"),
    Action(
        "alt+r",
        "earlier_prompts",
        "Earlier prompts",
        "Search your prompts of all chats, as Ctrl+R in a shell",
    ),
    Action(
        "alt+m",
        "fork",
        "Fork chat",
        "Start a new chat that begins as this one, up to the last prompt",
        "alt+f",  # its older key: many terminals send the same for it and for Ctrl+Right
    ),
    Action("ctrl+l", "models", "Models", "Choose, find, download or delete models; the chat goes on"),
    Action("ctrl+s", "export", "Export chat", "Write the chat to a Markdown file in this folder"),
    Action("f5", "dashboard", "Dashboard", "Show or hide what the machine does"),
    Action("f6", "next_backend", "Next backend", "NV, CUDA, CPU: go over to the next one that works here"),
    Action(
        "f7", "next_beam", "Next search width", "Go over to the preset of this backend that searches wider"
    ),
    Action("f8", "presets", "Presets", "Choose or edit how the engine is set up"),
    Action("f9", "zoom", "Whole pane", "Give the next pane of the dashboard the whole screen"),
    Action("f10", "compare", "Compare", "Have llama.cpp answer beside orin-chat, or no longer"),
    Action("f12", "system", "System prompt", "See or change the system prompt of this chat"),
    Action("alt+z", "suspend", "Suspend", "Go back to the shell; its command fg comes back"),
    Action("f1", "help", "Help", "All keys"),
    Action("ctrl+q", "quit", "Quit", "Leave; the conversation is saved"),
)

OTHER_KEYS = (
    ("Enter", "Send the prompt"),
    ("Ctrl+J, Alt+Enter", "New line; Shift+Enter too, where the terminal knows it"),
    ("@", "A file goes along: @notes.txt, @src/*.py; :10-40 after it takes lines; Tab completes its name"),
    ("Ctrl+V", "A picture that was copied on this machine's desktop goes along"),
    ("/", "A command, such as /help; Tab completes it"),
    ("Up, Down", "Earlier prompts, from the first and the last line"),
    ("Alt+Left, Alt+Right", "Versions: what Ctrl+R and F2 replaced, and back"),
    ("Page Up, Page Down", "Scroll; at the end the view follows the reply again"),
    ("Ctrl+Home, Ctrl+End", "First message, last message"),
    ("Mouse", "Selecting text copies it, a double click a word, a triple one a line; a click copies a link"),
    ("Ctrl+C", "Copy the selection; without one, stop the reply or clear the draft; twice, quit"),
    ("Alt+Y, Alt+C, Alt+A, Alt+N", "When a tool asks: run it once, always in this chat, always; or not"),
    ("Ctrl+D", "In an empty prompt: quit"),
    ("Ctrl+P", "All commands, and the theme"),
)

PANE_KEYS = (
    (
        "In the kernel table",
        "d decode or prefill, s sorts, f filters, p holds, m measures again, Enter shows the source; F9 goes there, "
        "and Tab from an empty prompt",
    ),
    (
        "In the graphs",
        "t changes between one minute and five, Left and Right show the figures of a moment; F9 goes there, and Tab "
        "from an empty prompt",
    ),
)


def key_label(key: str) -> str:
    """`ctrl+r` → Ctrl+R, `escape` → Esc."""
    return "+".join({"escape": "Esc"}.get(part, part.capitalize()) for part in key.split("+"))
