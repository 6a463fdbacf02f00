"""Styles of a widget's parts, its component classes, that are computed when the first is read."""

from typing import TYPE_CHECKING

from textual.css.styles import RenderStyles
from textual.dom import DOMNode

if TYPE_CHECKING:
    from textual.widget import Widget as _Widget
else:
    _Widget = object  # Textual looks for CSS in the first of a widget's bases that is a widget


class LateComponents(_Widget):
    """Goes before the base of a widget. Textual computes the styles of all parts whenever it computes the widget's own:
    twice before a chat is seen, for 50 parts of panes that nobody has opened."""

    def _get_component_classes(self) -> frozenset[str]:  # type: ignore[override]
        """The parts whose styles were read. The stylesheet computes them with the widget, and paints it where they have
        changed."""
        return frozenset(self._component_styles)

    def get_component_styles(self, *names: str) -> RenderStyles:
        """Raises KeyError for what is no part of the widget."""
        for name in super()._get_component_classes().intersection(names) - self._component_styles.keys():
            part = DOMNode(classes=name)
            part._attach(self)
            self.app.stylesheet.apply(part)
            self._component_styles[name] = part.styles
        return super().get_component_styles(*names)
