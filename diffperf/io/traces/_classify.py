"""What a device event is, told by its category and name: compute, communication, memory, synchronisation, other; and what a collective kernel's name says.

Streams say nothing: collectives run on whichever stream the framework took. The rules, in this order:

1. synchronisation: records of the category `cuda_sync`. They mark a host that waits for a stream; nothing runs.
2. memory: records of the categories `gpu_memcpy` and `gpu_memset`, whatever their names (`CopyHostToDevice` and `FillBuffer` on ROCm).
3. communication: kernels of NCCL and RCCL (`nccl...Kernel`, `rccl...Kernel`) and of MSCCL, with or without `void ` and namespaces before them; kernels that
   libraries bring for one node (`cross_device_reduce`, `...ShotAllReduce...`, `allreduce_fusion`, `all_reduce_kernel`, quick reduce, user buffers, multicast
   `multimem_...`); exchanges of experts (DeepEP, `moeAllToAll...`, `EpDispatch...`) and NVSHMEM; XLA's operations (`all-reduce.3`, `collective-permute`).
4. memory: `Memcpy`, `Memset`, `dma`, and ROCm's copy and fill kernels (`__amd_rocclr_copyBuffer`).
5. other: kernels whose name holds `Memcpy` or `Sync`; neither compute nor a transfer of a copy engine.
6. compute: every other kernel. One that Inductor fused (`triton_poi_fused_all_gather_into_tensor_...`) is named after the operators around it, and is compute.

HolisticTraceAnalysis goes by name alone: `^nccl.*Kernel` is communication, `^Memcpy`, `^Memset` and `^dma` are memory, rule 5 is as here, the rest is compute.
So rules 1 and 2, the rest of 3, and ROCm's kernels in 4 depart from it; where a trace holds none of these, its figures and ours are of the same thing.
A name with "reduce" in it is mostly not a collective. Leaves out which library a compute kernel is from.
"""

import re

from .._collective_table import datatype_name, op_name

COMPUTE, COMMUNICATION, MEMORY, SYNCHRONISATION, OTHER = range(5)
KINDS = ("compute", "communication", "memory", "synchronisation", "other")

_LIBRARY = re.compile(r"(?:void\s+)?(?:\w+::)*(?:nccl\w*Kernel|rccl\w*Kernel|msccl)", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"cross_device_(reduce|store|all_?gather)|(one|two)_?shot_?all_?reduce|all_?reduce_?fusion|multimem_\w*(all_?reduce|all_?gather|reduce_?scatter)"
    r"|lamport.*all_?reduce|quickreduce::|\bk?user_?buffers_|(^|[\s:])all_?reduce_?(kernel|all_?pairs|prototype)"
    r"|nvshmem|\bdeep_ep::|\bhybrid_ep::|moe_?(all_?to_?all|A2A)|\bEp(Dispatch|Combine)\w*Kernel"
    r"|^%?(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(-start|-done)?(\.\d+)?(\s|$|=)",
    re.IGNORECASE,
)
_FUSED = re.compile(r"triton_\w*fused_")
_MEMORY = re.compile(r"Memcpy|Memset|dma|__amd_rocclr_(copy|fill)Buffer")
_OTHER = re.compile(r"Memcpy|Sync")
_CATEGORIES = {"cuda_sync": SYNCHRONISATION, **dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), MEMORY)}

_OPS = r"AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv"
_KERNEL_OP = re.compile(rf"\bnccl(?:Symk?)?(?:Dev)?(?:Kernel_)?({_OPS})")
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


def kind_of(name: str, category: str = "") -> int:
    """Index into `KINDS` of a device event; `category` as Kineto writes it, in small letters, "" where there is none."""
    if category in _CATEGORIES:
        return _CATEGORIES[category]
    if _LIBRARY.match(name) or (_COMMUNICATION.search(name) and not _FUSED.match(name)):
        return COMMUNICATION
    if _MEMORY.match(name):
        return MEMORY
    return OTHER if _OTHER.search(name) else COMPUTE


def collective_of_kernel(name: str) -> tuple[str, str, str]:
    """Operation (one of `diffperf.io`'s, "" if the name does not say), algorithm and protocol of a collective kernel.

    `SendRecv` is what all-to-all, pairwise all-gather and point-to-point look like; the algorithm, protocol and type in its name are placeholders.
    """
    found = _KERNEL_OP.search(name)
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
