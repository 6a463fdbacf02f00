from tests.app.conftest import _quick_and_alone

__all__ = ["_quick_and_alone"]
