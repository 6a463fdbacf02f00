"""Proxies and certificates, which the libraries read from the environment when they make an HTTP client."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import UsageError, one_line
from engine.invocation import pip_install


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
