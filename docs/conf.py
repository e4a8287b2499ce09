"""How the documentation site is built: `make docs`. Nothing is fetched; what is generated comes from the code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import cbdsl

project = "cbdsl"
version = release = cbdsl.__version__
copyright = "the cbdsl authors, Apache-2.0"  # noqa: A001 - Sphinx wants this name

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "site_pages", "site_parser"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_type_aliases = {name: name for name in ("ArrayLike", "Doubles", "Floats", "Indices", "AggregationRule")}
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
add_module_names = False

# Code can be copied with a button, without the prompts; what a notebook's cell printed has none.
copybutton_selector = "div:not(.outcome) > div.highlight > pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"cbdsl {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
