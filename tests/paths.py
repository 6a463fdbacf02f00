"""Where things are: the checkout, and the test data beside it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("ORIN_SHARED", ROOT.parent / "shared"))
"""Oracles, vocabularies and the maker of full-size models; absent on most machines."""
