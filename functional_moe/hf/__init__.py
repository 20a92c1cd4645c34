"""Models from Hugging Face's directories and back.

>>> config, params, balance, left_out = load("Qwen3-30B-A3B")
>>> save("mine", config, params, balance, dtype=torch.bfloat16)

``transformers`` is not needed for either. Architectures: Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE, dots.llm1, GLM-4-MoE.
"""

from ._config import FAMILIES as FAMILIES
from ._config import Family as Family
from ._config import config_from_hf as config_from_hf
from ._config import config_to_hf as config_to_hf
from ._errors import HFError as HFError
from ._files import read_json as read_json
from ._weights import CONFIG_FILE as CONFIG_FILE
from ._weights import GENERATION_FILE as GENERATION_FILE
from ._weights import WEIGHTS_FILE as WEIGHTS_FILE
from ._weights import Imported as Imported
from ._weights import appearing as appearing
from ._weights import check_free as check_free
from ._weights import load as load
from ._weights import save as save
