"""Names and passwords from netrc, since the addresses that users give are stored and shown without any."""

import netrc
import os
from urllib.parse import urlsplit

from engine.errors import UsageError


def credentials(url: str) -> tuple[str, str] | None:
    """The name and the password for the host of `url` in the file that the variable NETRC names, else in ~/.netrc. None
    if there are none, or the address itself has some. An entry for all other hosts is not used: it would go to any.

    Raises UsageError if the file cannot be read. Format: netrc(5)."""
    address = urlsplit(url)
    if "@" in address.netloc or not address.hostname:
        return None
    path = os.environ.get("NETRC")
    try:
        entry = netrc.netrc(path or None).hosts.get(address.hostname)  # None: also checks who can read it
    except (FileNotFoundError, NotADirectoryError):
        return None
    except netrc.NetrcParseError as error:  # its message may hold a password
        reason = f"line {error.lineno} is not valid" if error.lineno else error.msg
    except (OSError, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else "it is not a text file"
    else:
        return (entry[0], entry[2]) if entry else None
    raise UsageError(
        f"Passwords cannot be read from {path or '~/.netrc'}: {reason}.",
        "Mend it, or name another file with the variable NETRC.",
    )
