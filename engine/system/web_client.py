"""What an HTTP client takes from the environment: proxies and certificates, which the libraries read when they make
one, and names and passwords from netrc, since the addresses that users give are stored and shown without any."""

import netrc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from engine.errors import UsageError, one_line
from engine.system.invocation import pip_install


@contextmanager
def making_client() -> Iterator[None]:
    """A context for making an HTTP client. Raises UsageError if the environment names a proxy or certificates that
    cannot be used."""
    try:
        yield
    except ImportError as error:
        if "SOCKS" not in str(error):
            raise
        raise UsageError(
            "A SOCKS proxy, as ALL_PROXY or another variable names it, needs the library socksio.",
            f"Install it, {pip_install('socksio')}, or unset the variable.",
        ) from None
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"The certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {one_line(str(error))}.",
            "Unset the variable, or let it name a file of certificates.",
        ) from None


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
