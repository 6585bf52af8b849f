"""Settings of the documentation: `make docs` builds it, with every warning an error."""

import re

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from wheretolearn.version import __version__

project = "wheretolearn"
author = "the wheretolearn authors"
release = version = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nitpicky = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"wheretolearn {__version__}"
html_copy_source = html_show_copyright = False
html_math_renderer = "mathml"


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{latex2mathml.tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def _link_to_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Markdown files outside of this folder are files, and no pages of the documentation."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)\)", r"](<path:\1>)", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_to_files)
    # Browsers draw MathML themselves: the pages need no script from the network.
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
