"""What a device event is, told by its name: compute, communication, memory, synchronisation, other; and what the name of a collective kernel says.

Streams say nothing: collectives run on whichever stream the framework took. The rules, in this order:

1. communication: kernels of NCCL and RCCL (`nccl...Kernel...`, which RCCL uses too) and of MSCCL; one- and two-shot all-reduces of inference libraries
   (`cross_device_reduce`, `...ShotAllReduce...`, `allreduce_fusion`), NVSHMEM, DeepEP; XLA's collective operations (`all-reduce.3`, `collective-permute`).
2. memory: `Memcpy`, `Memset`, `dma`, and ROCm's copy and fill kernels (`__amd_rocclr_copyBuffer`).
3. synchronisation: records of the category cuda_sync. They mark a host that waits for a stream; nothing runs.
4. other: kernels whose name holds `Memcpy`, or `Sync`, or begins with `Memset`; neither compute nor a transfer of a copy engine.
5. compute: every other kernel.

Apart from the further names in 1 and 2 these are the kinds of HolisticTraceAnalysis, so that its figures and ours are of the same thing.
A name with "reduce" in it is mostly not a collective. Leaves out which library a compute kernel is from.
"""

import re

from .._collective_table import datatype_name, op_name

COMPUTE, COMMUNICATION, MEMORY, SYNCHRONISATION, OTHER = range(5)
KINDS = ("compute", "communication", "memory", "synchronisation", "other")

_NCCL = re.compile(r"nccl.*Kernel|msccl", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"cross_device_reduce|(one|two)_?shot_?all_?reduce|all_?reduce_?fusion|multimem_all_reduce|lamport.*all_?reduce|nvshmem|\bdeep_ep::"
    r"|^%?(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(-start|-done)?(\.\d+)?(\s|$|=)",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"Memcpy|Memset|dma|__amd_rocclr_(copy|fill)Buffer")
_OTHER = re.compile(r"Memset|.*Memcpy|.*Sync")

_OPS = r"AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv"
_KERNEL_OP = re.compile(rf"nccl(?:Dev)?(?:Kernel_)?({_OPS})")
_PROTOCOL = re.compile(r"_(LL128|LL|SIMPLE)(?:_|\(|$)", re.IGNORECASE)
_ALGORITHM = re.compile(r"_(RING|TREE|COLLNET(?:_DIRECT|_CHAIN)?|NVLS(?:_TREE)?|PAT)_", re.IGNORECASE)
_RECORDED = (
    ("reduce_scatter", "reduce_scatter"), ("reducescatter", "reduce_scatter"), ("all_gather", "all_gather"), ("allgather", "all_gather"),
    ("all_reduce", "all_reduce"), ("allreduce", "all_reduce"), ("all_to_all", "all_to_all"), ("alltoall", "all_to_all"), ("broadcast", "broadcast"),
    ("gather", "gather"), ("scatter", "scatter"), ("send", "send_recv"), ("recv", "send_recv"), ("reduce", "reduce"),
)  # fmt: skip
_TYPES = {
    "byte": "uint8", "unsigned char": "uint8", "bool": "uint8", "char": "int8", "signed char": "int8", "int": "int32", "long": "int64", "long int": "int64",
    "c10::bfloat16": "bf16", "c10::half": "fp16",
}  # fmt: skip


def kind_of(name: str, synchronisation: bool = False) -> int:
    """Index into `KINDS` of a device event; `synchronisation` is true for records of cuda_sync."""
    if synchronisation:
        return SYNCHRONISATION
    if _NCCL.match(name) or _COMMUNICATION.search(name):
        return COMMUNICATION
    if _MEMORY.match(name):
        return MEMORY
    return OTHER if _OTHER.match(name) else COMPUTE


def collective_of_kernel(name: str) -> tuple[str, str, str]:
    """Operation (one of `diffperf.io`'s, "" if the name does not say), algorithm and protocol of a collective kernel.

    `SendRecv` is what all-to-all, pairwise all-gather and point-to-point look like; the algorithm, protocol and type in its name are placeholders.
    """
    found = _KERNEL_OP.match(name)
    if not found:
        xla = re.match(r"%?([a-z-]+?)(-start|-done)?(\.\d+)?(\s|$|=)", name)
        return (op_name(xla[1].removeprefix("ragged-")) if xla else ""), "", ""
    op = op_name(found[1])
    if op == "send_recv":
        return op, "", ""
    algorithm, protocol = _ALGORITHM.search(name), _PROTOCOL.search(name)
    return op, algorithm[1].lower() if algorithm else "", protocol[1].lower() if protocol else ""


def collective_of_record(name: str) -> tuple[str, bool]:
    """Operation of a collective as the framework records it (`_allgather_base`, `nccl:all_reduce`, `reduce_scatter_tensor_coalesced`), and whether
    several were joined into one; "" for a stranger."""
    plain = name.lower().removeprefix("nccl:").removeprefix("rccl:").strip("_ ")
    op = next((op for word, op in _RECORDED if plain.startswith(word)), "")
    return op, "coalesced" in plain


def type_name(text: str) -> str:
    """The name used here of a datatype as PyTorch writes it (`c10::BFloat16`, `Float`, `long int`)."""
    plain = text.strip().lower()
    return "fp8" if "float8" in plain else _TYPES.get(plain, datatype_name(plain.removeprefix("c10::")))
