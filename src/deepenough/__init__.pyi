# The public API, as type checkers see it; `__init__.py` loads each name from here on its first use.

from .cli import train as train
from .compare.frontier import compare as compare
from .decoding.api import early_exit as early_exit
from .decoding.api import speculate as speculate
from .decoding.calibration import Calibration as Calibration
from .decoding.calibration import calibrate as calibrate
from .decoding.draft_model import DraftModel as DraftModel
from .decoding.drafters import Drafter as Drafter
from .decoding.drafters import FallbackDrafter as FallbackDrafter
from .decoding.drafters import LinearDrafter as LinearDrafter
from .decoding.drafters import LookupDrafter as LookupDrafter
from .decoding.drafters import ShortcutDrafter as ShortcutDrafter
from .decoding.early_exit import ConfidenceGap as ConfidenceGap
from .decoding.early_exit import ExitPolicy as ExitPolicy
from .decoding.early_exit import FixedLayer as FixedLayer
from .decoding.early_exit import LowEntropy as LowEntropy
from .decoding.early_exit import TopProbability as TopProbability
from .decoding.lookup import LookupTable as LookupTable
from .errors import UserError as UserError
from .hf.loading import load as load
from .lazy.modeling import LazyTransformerConfig as LazyTransformerConfig
from .lazy.modeling import LazyTransformerForCausalLM as LazyTransformerForCausalLM
from .lazy.modeling import (
    LazyTransformerForConditionalGeneration as LazyTransformerForConditionalGeneration,
)
from .lazy.transition import LazyTransition as LazyTransition
from .par.modeling import ParConfig as ParConfig
from .par.modeling import ParForCausalLM as ParForCausalLM
from .par.modeling import ParForMaskedLM as ParForMaskedLM
from .ponder.config import PonderAlbertConfig as PonderAlbertConfig
from .ponder.config import PonderEncoderConfig as PonderEncoderConfig
from .ponder.modeling import (
    PonderAlbertForSequenceClassification as PonderAlbertForSequenceClassification,
)
from .ponder.modeling import (
    PonderEncoderForSequenceClassification as PonderEncoderForSequenceClassification,
)
from .profiling import profile as profile
from .runs import Record as Record
from .runs import RunFolder as RunFolder
from .shortcut.modeling import Shortcuts as Shortcuts
from .shortcut.pruned_model import PrunedConfig as PrunedConfig
from .shortcut.pruned_model import PrunedForCausalLM as PrunedForCausalLM
from .shortcut.pruned_model import PrunedForMaskedLM as PrunedForMaskedLM
from .shortcut.pruned_model import (
    PrunedForSequenceClassification as PrunedForSequenceClassification,
)
from .shortcut.pruning import prune as prune
from .trace import DepthTrace as DepthTrace

__all__: list[str]
__version__: str
