"""Checks of a drawn figure: its texts, and whether they fit."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def assert_nothing_clipped(figure: Figure) -> None:
    """Every visible text lies inside the figure, once it is drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    for axes in figure.findobj(lambda artist: hasattr(artist, "get_xticklabels")):
        box = axes.get_tightbbox(canvas.get_renderer())
        assert box.x0 >= -1, (axes, box)
        assert box.y0 >= -1, (axes, box)
        assert box.x1 <= width + 1, (axes, box)
        assert box.y1 <= height + 1, (axes, box)
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert min(box.x0, box.y0) >= 0, box
        assert max(box.x1 / width, box.y1 / height) <= 1, box
