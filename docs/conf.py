"""How Sphinx builds these pages: ``python -m sphinx -W -E -a -b html docs build/docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import generate  # noqa: E402

import embedx  # noqa: E402

generate.write(HERE / "reference")

project = "embedx"
release = embedx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"embedx {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
highlight_language = "text"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
