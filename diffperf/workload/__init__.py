"""What is computed, independent of any machine: the transformer family, its catalog and its importers."""

from ._build import Layer as Layer
from ._build import gated_delta_mixer as gated_delta_mixer
from ._build import mamba2_mixer as mamba2_mixer
from ._build import transformer as transformer
from ._catalog import CatalogEntry as CatalogEntry
from ._catalog import UnknownModelError as UnknownModelError
from ._catalog import catalog_entry as catalog_entry
from ._catalog import load_model as load_model
from ._catalog import model_names as model_names
from ._catalog import published_parameters as published_parameters
from ._catalog import resolve_model_name as resolve_model_name
from ._huggingface import from_huggingface as from_huggingface
from ._jax_function import Operator as Operator
from ._jax_function import operators_of as operators_of
from ._transformer import Blocks as Blocks
from ._transformer import Transformer as Transformer
from ._transformer import forward_flops_per_sequence as forward_flops_per_sequence
from ._transformer import num_active_parameters as num_active_parameters
from ._transformer import num_layers as num_layers
from ._transformer import num_parameters as num_parameters
from ._transformer import pad_kinds as pad_kinds
from ._transformer import with_seq_len as with_seq_len
