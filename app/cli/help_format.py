"""How the texts of `--help` are broken into lines."""

import argparse
import textwrap


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, but those of paragraphs that are too wide for the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            self._paragraph(part, width) for part in super()._fill_text(text, width, indent).split("\n\n")
        )

    @staticmethod
    def _paragraph(text: str, width: int) -> str:
        is_table = "  " in text
        if is_table or max(map(len, text.splitlines()), default=0) <= width:
            return text
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)
