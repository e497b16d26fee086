"""What is computed, independent of any machine: the transformer family, its catalog and its importers."""

from ._transformer import Blocks as Blocks
from ._transformer import Transformer as Transformer
from ._transformer import forward_flops_per_sequence as forward_flops_per_sequence
from ._transformer import num_active_parameters as num_active_parameters
from ._transformer import num_layers as num_layers
from ._transformer import num_parameters as num_parameters
from ._transformer import pad_kinds as pad_kinds
from ._transformer import with_seq_len as with_seq_len
