"""Recognizes files of other kinds that are given in the place of a GGUF file, for the sentence that refuses them."""


def guess_kind(head: bytes, size: int) -> str:
    """The kind of a file that is not GGUF, guessed from its first bytes; "" if it is unknown."""
    text = head.lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (the model itself was not downloaded)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
        return "a safetensors file"
    if head.startswith(b"PK"):
        return "a zip archive or a PyTorch checkpoint"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"(\xb5/\xfd")):
        return "a compressed archive"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a model in a format older than GGUF"
    if text.startswith((b"{", b"[")):
        return "a JSON file"
    if head.count(0) == len(head):
        return "a file of zeros (an unfinished download?)"
    return "a text" if len(text) > 4 and all(9 <= byte < 127 for byte in text) else ""
