"""What Tabby's editor extensions ask beside completions, whose `segments` `completions` takes:
https://tabby.tabbyml.com/api/."""

from app.serve.protocols.common.reply import Json
from app.serve.service import Service


def settings(service: Service) -> Json:
    return {"disable_client_side_telemetry": True}


def unheard(service: Service) -> Json:
    """Events of what a user took of a completion, which nobody keeps."""
    return {}
