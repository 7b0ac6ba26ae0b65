"""The explorer as a hosted Space: `python app.py`, with deepenough[explorer] installed.

On Hugging Face, who may see a Space is decided there, so that the page is open to whoever reaches
it. Anywhere else this is `deepenough explore`, for this machine alone.
"""

import os

from deepenough.__main__ import ask_for_a_short_spin

ask_for_a_short_spin()  # before torch is loaded

from deepenough.explorer.app import serve  # noqa: E402
from deepenough.explorer.commands import ExploreConfig  # noqa: E402

if __name__ == "__main__":
    is_space = "SPACE_ID" in os.environ
    serve(ExploreConfig(host="0.0.0.0", port=7860) if is_space else ExploreConfig())
