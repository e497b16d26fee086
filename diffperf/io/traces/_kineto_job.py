"""What a Kineto file says of its job beside the events: rank, number of ranks, process groups, devices, libraries, and the base of its times."""

from typing import Any

from ._numbers import clean, rank_in_name, ranks, whole
from ._tables import Remarks


class Job:
    """The members of a file other than `traceEvents`; what cannot be is left out with a remark.

    Attributes:
      rank, world_size: -1 where not recorded.
      groups: name of a process group -> its ranks.
      library: such as "NCCL 2.17.1", "" where not recorded.
      base_ns: what the file adds to all times. [ns]
    """

    def __init__(self, file: str, meta: dict[str, Any], remarks: Remarks):
        info = meta.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        self.groups = {clean(str(group.get("pg_name"))): ranks(group.get("ranks")) for group in _dicts(info.get("pg_config"))}
        rank, world = whole(info.get("rank")), whole(info.get("world_size"))
        for key, value, least in (("rank", rank, 0), ("world_size", world, 1)):
            if info.get(key) is not None and value < least:
                remarks.add(f"a {key} that is no whole number from {least} on, not used", f"{key} is {str(info[key])[:40]!r}")
        if 0 < world <= rank:
            remarks.add("a rank outside its job, whose size is not used", f"rank is {rank}, world_size is {world}; ranks count from 0")
            world = -1
        self.rank, self.world_size = max(rank if rank >= 0 else rank_in_name(file), -1), world if world > 0 else -1
        version = clean(info.get("nccl_version"))
        self.library = f"NCCL {version}" if version else ""
        base = meta.get("baseTimeNanoseconds", 0)
        if base != 0 and whole(base) <= 0:
            remarks.add("a baseTimeNanoseconds that is no time, taken as 0", str(base)[:40])
        self.base_ns = max(whole(base), 0)
        self._devices = _dicts(meta.get("deviceProperties"))

    def accelerator(self, device: int) -> tuple[str, int]:
        """Name of a device, "" where not recorded, and its processors, 0 where not; of the first device where this one is not described."""
        found = next((item for item in self._devices if whole(item.get("id")) == device), self._devices[0] if self._devices else {})
        return clean(found.get("name")), max(whole(found.get("numSms")), 0)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
