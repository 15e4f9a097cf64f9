"""The greedy allocation behind `infer_auto_device_map`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from notebook_accelerate.big_modeling.module_tree import ModuleTree, Totals, as_names, full_name, prefixes
from notebook_accelerate.config.plain_values import size_text

_IS_WAITING, _IS_PLACED = 1, 2


class Allocation:
    """Assigns the modules of a tree to devices in order. The last device is the disk, which has no limit.

    An entry is a module or a single tensor, and has an index. Modules have the same indices as in the tree, and tensors
    follow them. The properties of entries are in lists with these indices, so that a step takes about a microsecond.

    Args:
        tree: The tree of the model's modules.
        totals: The size of each module in bytes, and the tied parameters.
        limits: The limit of each device in bytes, in the order that devices are filled.
        no_split: The names of classes that are not split across devices.
        verbose: Whether to print every decision.
        fallback: Whether to search for a module that fits if a device would otherwise stay empty.
    """

    def __init__(
        self,
        tree: ModuleTree,
        totals: Totals,
        limits: Mapping[Any, int],
        no_split: Any,
        verbose: bool,
        fallback: bool,
    ) -> None:
        self.tree, self.limits = tree, dict(limits)
        self.accelerators = [device for device in limits if device not in ("cpu", "disk")]
        self.used: dict[Any, Any] = {}
        self.too_small: dict[Any, Any] = {}
        """For each device that received no modules, the number of bytes that the next module would have needed."""
        self.offloaded: list[int] = []
        self._devices = [device for device in limits if device != "disk"] + ["disk"]
        self._main = {"mps"} if "mps" in limits else {*self.accelerators[:1], "cpu"}
        self._no_split = frozenset(as_names(no_split))
        self._log = print if verbose else None
        self._fallback = fallback
        self._measure = totals.measure
        self._modules = len(tree.names)
        self._names, self._sizes, self._after = list(tree.names), list(totals.all), list(tree.ends)
        self._second = {name for group in totals.tied for name in group[1:]}
        self._owner: dict[int, int] = {}
        self._device_of: list[Any] = [None] * self._modules
        self._state = bytearray(self._modules)
        self._numbers = {name: number for number, name in enumerate(tree.names)} if totals.tied else {}
        self._groups = _groups_by_prefix(totals.tied)
        self._own: list[Any] = []
        self._ahead: list[Any] = []
        self._layers = self._largest_from()
        self._waiting: list[int] = []
        self._large: dict[int, Any] = {}
        self._current = 0

    # ---- placing

    def place_all(self) -> None:
        """Place all entries on devices."""
        top = self._parts(0)
        self._large = self._large_tensors(top)
        self._push(top)
        todo, state, groups = self._waiting, self._state, self._groups
        while todo:
            if not groups and not self._log and not self._large:
                self._place_run()
                if not todo:
                    break
            entry = todo.pop()
            if state[entry] == _IS_PLACED:
                continue
            state[entry] = 0
            if self._large:
                self._large.pop(entry, None)
            if groups and self._names[entry] in groups:
                self._place_tied(entry)
            else:
                self._place(entry)

    def _place_run(self) -> None:
        """Place entries on the current device while they fit. This is a fast loop for the common case."""
        todo, sizes, state, placed = self._waiting, self._sizes, self._state, self._device_of
        device = self._device()
        if device == "disk":
            return
        main, layers, after = device in self._main, self._layers, self._after
        left = self.limits[device] - self.used.get(device, 0)
        offloaded = device == "cpu"
        while todo:
            entry = todo[-1]
            size = sizes[entry]
            if state[entry] != _IS_WAITING or size > (left - layers[after[entry]] if main else left):
                break
            left -= size
            placed[entry] = device
            state[entry] = _IS_PLACED
            todo.pop()
            if offloaded and entry < self._modules:
                self.offloaded.append(entry)
        if left != self.limits[device] - self.used.get(device, 0):
            self.used[device] = self.limits[device] - left

    def _place(self, entry: int) -> None:
        room = self._room(entry)
        if self._log:
            self._log(f"{self._names[entry]} ({size_text(self._sizes[entry])}): {_room_text(room)} on {self._device()}")
        if room is None or self._sizes[entry] <= room:
            self._assign(entry)
        elif parts := self._parts_of(entry):
            self._split(parts)
        else:
            self._next_device(entry)

    def _place_tied(self, entry: int) -> None:
        ties, room = self._tied_with(entry), self._room(entry)
        if ties and self._log:
            others = ", ".join(self._names[other] for other in dict.fromkeys(ties.values()))
            size = f"{size_text(self._sizes[entry])}, {size_text(self._size_with_ties(entry, ties))} with {others}"
            self._log(f"{self._names[entry]} ({size}): {_room_text(room)} on {self._device()}")
        if not ties:
            self._place(entry)
        elif room is None or self._size_with_ties(entry, ties) <= room:
            self._assign_tied(entry, ties)
        elif self._sizes[entry] >= room and (parts := self._parts_of(entry)):
            self._split(parts)
        elif self._sizes[entry] > room or not self._split_ties(entry, room):
            self._next_device(entry)

    def _assign_tied(self, entry: int, ties: Mapping[str, int]) -> None:
        for other in set(ties.values()):
            self._assign(other)
            if other < self._modules:
                self._forget_layers(other)
        self._assign(entry)

    def _split_ties(self, entry: int, room: Any) -> bool:
        """Split the modules that share parameters with an entry until the entry and the sharing parts fit, if possible.

        Returns:
            Whether they fit.
        """
        divided: dict[int, list[int]] = {}
        while self._size_with_ties(entry, ties := self._tied_with(entry, divided)) > room:
            others = {other: parts for other in ties.values() if (parts := self._parts_of(other))}
            sizes = {
                other: self._size_with_ties(entry, self._tied_with(entry, {**divided, other: parts}))
                for other, parts in others.items()
            }
            if not sizes:
                return False
            # Split the first module that makes enough room or, if no module does, the one that saves the most.
            enough = (other for other, size in sizes.items() if size <= room)
            chosen = next(enough, min(sizes, key=lambda other: sizes[other]))
            divided[chosen] = others[chosen]
        for other, parts in divided.items():
            if self._log:
                self._log(f"  {self._names[other]} shares a parameter with {self._names[entry]}: split")
            self._replace(other, parts)
        self._push([entry])
        return True

    def _size_with_ties(self, entry: int, ties: Mapping[str, int]) -> Any:
        """Return the total size of an entry and the entries tied to it. Shared parameters are counted once."""
        return self._sizes[entry] + sum(self._sizes[other] for other in set(ties.values()))

    def _next_device(self, entry: int) -> None:
        if self._fallback and not self.used.get(self._device()) and self._fill_empty_device(entry):
            return
        if not self.used.get(self._device()):
            reserved = self._layers[self._after[entry]] if self._device() in self._main else 0
            self.too_small[self._device()] = self._sizes[entry] + reserved
        if self._log:
            self._log(f"  no room on {self._device()}: continue with the next device")
        self._current += 1
        self._push([entry])

    def _fill_empty_device(self, entry: int) -> bool:
        """Place the first module, in breadth-first order, that fits on the empty device. Return whether one does."""
        limit = self.limits[self._device()]
        if self._device() in self._main:
            limit -= self._layers[0]
        queue = deque([entry, *(other for other in reversed(self._waiting) if self._state[other] == _IS_WAITING)])
        while queue:
            found = queue.popleft()
            if found < self._modules and self._sizes[found] <= limit and self._names[found] not in self._groups:
                self._push([entry])
                self._isolate(found)
                self._assign(found)
                self._forget_layers(found)
                return True
            queue += self._parts_of(found)
        return False

    def _isolate(self, found: int) -> None:
        """Split the modules that contain a module, until that module is a separate entry."""
        while self._state[found] != _IS_WAITING:
            outer = self.tree.parents[found]
            while self._state[outer] != _IS_WAITING:
                outer = self.tree.parents[outer]
            self._replace(outer, self._parts(outer))

    # ---- entries

    def _push(self, entries: Sequence[int]) -> None:
        self._waiting += reversed(entries)
        for entry in entries:
            self._state[entry] = _IS_WAITING

    def _split(self, parts: Sequence[int]) -> None:
        if self._log:
            self._log(f"  no room on {self._device()}: split")
        self._large = {}
        self._push(parts)

    def _replace(self, entry: int, parts: Sequence[int]) -> None:
        """Replace a waiting entry with its parts."""
        place = len(self._waiting) - 1 - self._waiting[::-1].index(entry)
        self._waiting[place : place + 1] = list(reversed(parts))
        self._state[entry] = 0
        for part in parts:
            self._state[part] = _IS_WAITING

    def _parts_of(self, entry: int) -> list[int]:
        """Return the parts of an entry. Layers, tensors and modules that must not be split have no parts."""
        if entry >= self._modules or self.tree.ends[entry] == entry + 1:
            return []
        return [] if type(self.tree.modules[entry]).__name__ in self._no_split else self._parts(entry)

    def _parts(self, node: int) -> list[int]:
        """Return the entries for a module's parameters, children and buffers."""
        ends, module = self.tree.ends, self.tree.modules[node]
        found = [self._tensor(node, key, node + 1) for key, value in module._parameters.items() if value is not None]
        child, end = node + 1, ends[node]
        while child < end:
            found.append(child)
            child = ends[child]
        return found + [self._tensor(node, key, end) for key, value in module._buffers.items() if value is not None]

    def _tensor(self, node: int, key: str, after: int) -> int:
        """Return a tensor's index, which does not change when its module is split."""
        name = full_name(self.tree.names[node], key)
        if (known := self._numbers.get(name)) is not None:
            return known
        number = len(self._names)
        self._names.append(name)
        self._sizes.append(
            self._measure(name, getattr(self.tree.modules[node], key)) if name not in self._second else 0
        )
        self._after.append(after)
        self._state.append(0)
        self._device_of.append(None)
        self._numbers[name] = number
        self._owner[number] = node
        return number

    def _assign(self, entry: int) -> None:
        device = self._devices[self._current]
        self.used[device] = self.used.get(device, 0) + self._sizes[entry]
        self._device_of[entry] = device
        self._state[entry] = _IS_PLACED
        if self._log:
            self._log(f"  {self._names[entry]} is placed on {device}")
        if device in ("cpu", "disk") and entry < self._modules:
            self.offloaded.append(entry)

    # ---- sizes

    def _device(self) -> Any:
        return self._devices[self._current]

    def _room(self, entry: int) -> Any:
        """Return how many bytes are left on the current device, or None for the disk, which has no limit."""
        device = self._devices[self._current]
        if device == "disk":
            return None
        room = self.limits[device] - self.used.get(device, 0)
        if device in self._main:
            later = self._layers[self._after[entry]]
            room -= max([later, *self._large.values()]) if self._large else later
        return room

    def _large_tensors(self, top: Sequence[int]) -> dict[int, Any]:
        """Return the largest of the model's own tensors, if they are larger than any layer.

        Memory is reserved for them until the first split.
        """
        tensors = {entry: self._sizes[entry] for entry in top if entry >= self._modules}
        largest = max(tensors.values(), default=0)
        return {entry: size for entry, size in tensors.items() if size == largest and size > self._layers[0]}

    def reserve(self, device: Any) -> Any:
        """Return how many bytes a device reserves for the largest offloaded layer.

        Args:
            device: The accelerator that may compute with offloaded layers.
        """
        if device not in self._main:
            return 0
        return max((max(self._own[node : self.tree.ends[node]]) for node in self.offloaded), default=0)

    def _largest_from(self) -> list[Any]:
        """Return, for each index, the size of the largest layer from there on.

        Computing this once keeps placement linear.
        """
        ends, modules, no_split, sizes = self.tree.ends, self.tree.modules, self._no_split, self._sizes
        own: list[Any] = [
            size if end == index + 1 else 0 for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        own[0] = 0  # The model itself is always split.
        own.append(0)
        index = 1
        while no_split and index < self._modules:
            if type(modules[index]).__name__ in no_split:  # The modules inside do not count as layers.
                own[index : ends[index]] = [sizes[index], *[0] * (ends[index] - index - 1)]
                index = ends[index]
            else:
                index += 1
        self._own, self._ahead = own, list(own)
        return list(accumulate(reversed(own), max))[::-1]

    def _forget_layers(self, node: int) -> None:
        """Stop reserving memory for the layers of a module that was placed out of order."""
        end = self.tree.ends[node]
        self._ahead[node:end] = [0] * (end - node)
        for index in range(end - 1, -1, -1):
            largest = max(self._ahead[index], self._layers[index + 1])
            if index < node and largest == self._layers[index]:
                return
            self._layers[index] = largest

    def _tied_with(self, entry: int, divided: Mapping[int, Sequence[int]] | None = None) -> dict[str, int]:
        """Return the waiting entries that share parameters with an entry, directly or through other entries.

        Args:
            entry: The entry whose ties are searched.
            divided: Waiting entries that are treated as replaced by their parts.

        Returns:
            The entries, by the name that the shared parameter has in each.
        """
        apart = {part for parts in (divided or {}).values() for part in parts}
        found: dict[str, int] = {}
        new = [entry]
        while new:
            for group in self._groups.get(self._names[new.pop()], ()):
                for tied in group:
                    number = self._holder(tied, divided or {}, apart)
                    if number is not None and number != entry and tied not in found:
                        new += [] if number in found.values() else [number]
                        found[tied] = number
        return found

    def _holder(self, tied: str, divided: Mapping[int, Sequence[int]], apart: Collection[int]) -> int | None:
        """Return the waiting entry that contains a parameter, or None if no entry does."""
        for outer in prefixes(tied):
            number = self._numbers.get(outer)
            if number is not None and (number in apart or self._state[number] == _IS_WAITING) and number not in divided:
                return number
        return None

    # ---- the result

    def device_map(self) -> dict[str, Any]:
        """Return the device of each entry, by the entry's name."""
        return {name: device for name, device in zip(self._names, self._device_of, strict=True) if device is not None}

    def clean_device_map(self) -> dict[str, Any]:
        """Return the device of each entry by name, joining entries that share a device under their parent's name."""
        devices, counts = self._devices_of_nodes()
        placed, ends, found = self._device_of, self.tree.ends, {}
        node = 0
        while node < self._modules:
            device = devices[node]
            # An entry without siblings keeps its own name, because Accelerate only joins two or more entries.
            if device is not None and device is not MIXED and (counts[node] > 1 or placed[node] is not None):
                found[self._names[node]] = device
                node = ends[node]
            else:
                node += 1
        for number in range(self._modules, len(placed)):
            name = self._names[number]
            if placed[number] is not None and not any(outer in found for outer in prefixes(name)):
                found[name] = placed[number]
        return found

    def _devices_of_nodes(self) -> tuple[list[Any], list[int]]:
        """Return the device of each module's entries (MIXED if several, None if no entries) and how many there are."""
        placed, parents = self._device_of, self.tree.parents
        devices = placed[: self._modules]
        counts = [0 if device is None else 1 for device in devices]
        for number in range(self._modules, len(placed)):
            if (device := placed[number]) is not None:
                node = self._owner[number]
                counts[node] += 1
                devices[node] = device if devices[node] in (None, device) else MIXED
        for node in range(self._modules - 1, 0, -1):
            device = devices[node]
            if device is not None:
                parent = parents[node]
                counts[parent] += counts[node]
                have = devices[parent]
                if have is not device:
                    devices[parent] = device if have is None or have == device else MIXED
        return devices, counts


MIXED = object()


def _groups_by_prefix(tied: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """Return, for each module, the groups of tied names that are partly inside and partly outside of the module."""
    found: dict[str, list[Sequence[str]]] = defaultdict(list)
    for group in tied:
        members: dict[str, int] = defaultdict(int)
        for name in group:
            for outer in prefixes(name):
                members[outer] += 1
        for outer, count in members.items():
            if count < len(group):
                found[outer].append(group)
    return found


def _room_text(room: Any) -> str:
    return "no limit" if room is None else f"{size_text(max(room, 0))} left"
