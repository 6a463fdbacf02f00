"""Paths of these protocols for what this server does not do: whoever asks is told so, in the form of the protocol."""

_SENTENCES = {
    "audio": "This server makes and reads no sound.",
    "images": "This server makes no pictures; models that see take them in chats.",
    "videos": "This server makes no videos.",
    "live": "This server takes no part in conversations of sound.",
    "realtime": "This server takes no part in conversations of sound.",
    "batches": "This server has no batches: send the requests themselves, also many at a time.",
    "files": "This server keeps no files: send them within a request.",
    "uploads": "This server keeps no files: send them within a request.",
    "moderations": "This server judges no texts.",
    "safety": "This server judges no texts.",
    "decisions": "This server judges no texts.",
    "fine_tuning": "This server trains no models.",
    "tunedModels": "This server trains no models.",
    "cachedContents": "This server keeps what prompts share by itself: send the contents.",
    "agents": "This server runs no agents: they run where you are, and ask it for answers.",
    "sessions": "This server runs no agents: they run where you are, and ask it for answers.",
    "environments": "This server runs no agents: they run where you are, and ask it for answers.",
    "assistants": "This server has no assistants: use chat completions or responses.",
    "threads": "This server has no assistants: use chat completions or responses.",
    "vector_stores": "This server keeps no vectors: /v1/embeddings makes them.",
    "evals": "This server has no evaluations.",
    "containers": "This server runs no code.",
    "chat": "This server keeps no completed chats: send the messages again.",
    "skills": "This server runs no code.",
    "complete": "Send /v1/messages in place of this old form.",
}
"""Sentences by the first or second part of a path."""


def sentence(path: str) -> str:
    """The sentence that says why this server has nothing at a path; "" if it has no sentence about the path."""
    parts = path.removeprefix("/v1").strip("/").split("/")
    if parts == ["chat", "completions"]:  # they are made there
        return ""
    return next((_SENTENCES[part] for part in parts[:2] if part in _SENTENCES), "")
