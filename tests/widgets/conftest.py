from tests.pilots import quick_pilot

__all__ = ["quick_pilot"]
