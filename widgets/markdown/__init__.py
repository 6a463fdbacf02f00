"""Markdown as models write it, untrusted and streamed, laid out in lines of a given width.

`parser` reads it, `stream` splits it into blocks while it arrives, `blocks` lays them out.
"""
