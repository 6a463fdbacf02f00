"""The pictures of a chat, for a terminal that draws them itself."""

import asyncio
import contextlib

from textual import on, work

from app.chat.file_reader import made_to_fit
from app.screens.chat_column import ChatColumn
from engine.errors import OrinError
from widgets.chat.thumbnail import thumbnail_number
from widgets.terminal.paced_output import PacedOutput
from widgets.terminal.terminal_pictures import cell_pixels


class DrawnPictures(PacedOutput):
    """A part of `ChatApp`."""

    column: ChatColumn

    @on(PacedOutput.PicturesMissed)
    @work(group="pictures")
    async def _give_pictures(self, event: PacedOutput.PicturesMissed) -> None:
        """Gives the terminal the pictures that it can draw, as large as their thumbnails."""
        files = (file.picture for turn in self.column.transcript.turns for file in turn.files)
        known = {thumbnail_number(picture): picture for picture in files if picture}
        width, height = cell_pixels()
        for shown in event.shown:
            if picture := known.get(shown.picture):
                within = shown.columns * width, shown.rows * height
                with contextlib.suppress(OrinError):  # its half blocks stay
                    rgb = (await asyncio.to_thread(made_to_fit, picture, within)).rgb
                    self.pictures.give(shown, rgb.tobytes(), (rgb.shape[1], rgb.shape[0]))
                    self.write_pictures()
