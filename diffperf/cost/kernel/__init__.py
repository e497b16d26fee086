"""How long one kernel takes, from its shape, the chip and the constants of the library that ships it."""

from ._convolution import CONVOLUTION_PRIORS as CONVOLUTION_PRIORS
from ._convolution import ConvolutionConstants as ConvolutionConstants
from ._convolution import ConvolutionShape as ConvolutionShape
from ._convolution import convolution_kernel_time as convolution_kernel_time
from ._device import Device as Device
from ._device import device_of as device_of
from ._matmul import MATMUL_PRIORS as MATMUL_PRIORS
from ._matmul import MatmulConstants as MatmulConstants
from ._matmul import MatmulShape as MatmulShape
from ._matmul import matmul_kernel_time as matmul_kernel_time
from ._sparse import SPARSE_PRIORS as SPARSE_PRIORS
from ._sparse import AggregationShape as AggregationShape
from ._sparse import EmbeddingBagShape as EmbeddingBagShape
from ._sparse import SparseConstants as SparseConstants
from ._sparse import aggregation_kernel_time as aggregation_kernel_time
from ._sparse import embedding_bag_kernel_time as embedding_bag_kernel_time
from ._streaming import STREAMING_PRIORS as STREAMING_PRIORS
from ._streaming import StreamingConstants as StreamingConstants
from ._streaming import StreamingShape as StreamingShape
from ._streaming import adam_shape as adam_shape
from ._streaming import cast_shape as cast_shape
from ._streaming import cross_entropy_shape as cross_entropy_shape
from ._streaming import elementwise_shape as elementwise_shape
from ._streaming import normalisation_shape as normalisation_shape
from ._streaming import reduction_shape as reduction_shape
from ._streaming import streaming_kernel_time as streaming_kernel_time
