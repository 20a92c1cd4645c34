"""Plans and storage for ``torch.distributed.checkpoint``: parts of leaves in safetensors files, without pickle.

DCP plans who writes which part (replicas once, spread over the ranks) and which parts of which files a rank reads when
it holds other parts than were saved, and tells every rank when one fails. The rest is here. Its own metadata file is a
pickle, which runs code of whoever wrote it: there is a JSON manifest instead. Its planners ask DTensor which part a
rank holds: here that is said (:class:`LocalPart`), for staged copies in host memory too. Its Hugging Face writer builds
the whole file in memory, and its reader opens every file on every rank.

Each rank's file also carries what DCP's ``HuggingFaceStorageReader`` looks for, which therefore reads these folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ._manifest import (
    MANIFEST_FILE,
    CheckpointError,
    LeafEntry,
    LocalPart,
    LocalParts,
    Manifest,
    Part,
    dtype_name,
    manifest_text,
    partial_name,
)

_PARTIAL_NAME = re.compile(r"\.\d{6,}\.partial")


class SaveParts(DefaultSavePlanner):
    """Plans the writing of ``LocalParts``."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the parts."""
        self.flatten_state_dict = False
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Every part that is not empty."""
        self.plan = SavePlan([_write_item(name, part) for name, part in self.state_dict.items() if part.tensor.numel()])
        return self.plan


class LoadParts(LoadPlanner):
    """Plans the reading of ``LocalParts`` into their tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the parts."""
        self._parts, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of this rank's parts with the saved ones."""
        saved = self._metadata.state_dict_metadata  # type: ignore[union-attr]
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            if part.tensor.numel():
                items += create_read_items_for_chunk_list(name, saved[name], [_chunk(part)])  # type: ignore[arg-type]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refused: a checkpoint holds tensors alone."""
        raise TypeError(f"{read_item.dest_index.fqn!r} is no tensor; a checkpoint holds nothing else")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where to write what is read."""
        tensor: Tensor = self._parts[read_item.dest_index.fqn].tensor
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, begin, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there already."""


class StepWriter(StorageWriter):
    """Writes one step's folder, which gets its name when every rank is done."""

    def __init__(self, final: Path, manifest: Manifest, parts: LocalParts) -> None:
        """Takes the folder to make, the manifest without parts and files, and this rank's parts."""
        self.final, self.partial = final, partial_name(final)
        self.manifest, self.parts = manifest, parts
        self.file_name = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The coordinator makes the folder under its temporary name, and removes what a killed save left."""
        self.file_name = f"rank_{kwargs.get('rank', 0):05d}.safetensors"
        if is_coordinator:
            if self.final.exists():
                raise CheckpointError(f"{self.final} exists already; nothing is overwritten")
            self.final.parent.mkdir(parents=True, exist_ok=True)
            for left in filter(_is_partial, self.final.parent.iterdir()):
                shutil.rmtree(left)
            self.partial.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Sends along what must be the same on every rank."""
        return SavePlan(plan.items, storage_data=_digest(self.manifest))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The ranks must be saving one tree."""
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise CheckpointError(
                    f"rank {rank} saves another step, identity, extra, or tree (paths, shapes, dtypes) than rank 0"
                )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file, to the disk."""
        tensors: dict[str, Tensor] = {}
        results, seen = [], set()
        for item in plan.items:
            name = item.index.fqn
            part = self.parts[name]
            tensor = part.tensor.cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # The format wants every tensor alone in its memory.
            tensors[name] = tensor.clone() if storage in seen else tensor
            seen.add(storage)
            written = Part(self.file_name, tuple(part.offsets), tuple(tensor.shape))
            results.append(WriteResult(item.index, tensor.nbytes, written))
        if tensors:
            path = self.partial / self.file_name
            offsets = {name: {"saved_offsets": list(self.parts[name].offsets)} for name in tensors}
            about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            with _said_in_one_line("write", path):
                save_file(tensors, path, about)
                path.chmod(0o644)  # safetensors makes files that nobody else can read
                _to_disk(path)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator writes the manifest and gives the folder its name: the step is complete or is not there."""
        parts: dict[str, list[Part]] = {name: [] for name in self.manifest.leaves}
        for result in (result for of_rank in results for result in of_rank):
            parts[result.index.fqn].append(result.storage_data)
        leaves = {
            name: LeafEntry(leaf.shape, leaf.dtype, tuple(parts[name])) for name, leaf in self.manifest.leaves.items()
        }
        with _said_in_one_line("write", self.partial):
            names = sorted({part.file for of_leaf in parts.values() for part in of_leaf})
            files = {name: (self.partial / name).stat().st_size for name in names}
            path = self.partial / MANIFEST_FILE
            path.write_text(manifest_text(self.manifest._replace(leaves=leaves, files=files)), encoding="utf-8")
            _to_disk(path)
            _to_disk(self.partial)
            self.partial.rename(self.final)
            _to_disk(self.final.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Called when DCP is to choose a writer, which it is not."""
        return False


class StepReader(StorageReader):
    """Reads the parts of a step's folder that a rank needs."""

    def __init__(self, checkpoint: Path, manifest: Manifest, parts: LocalParts) -> None:
        """Takes a checked manifest."""
        self.checkpoint, self.manifest, self.parts = checkpoint, manifest, parts

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader reads once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest, in DCP's words."""

        def entry(name: str, part: LocalPart) -> TensorStorageMetadata:
            saved = self.manifest.leaves[name].parts
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in saved]
            return TensorStorageMetadata(TensorProperties(part.tensor.dtype), part.shape, chunks)

        return Metadata({name: entry(name, part) for name, part in self.parts.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The files that this rank will read are there, and whole."""
        for file in sorted({self._file(item.storage_index) for item in plan.items}):
            path, wanted = self.checkpoint / file, self.manifest.files[file]
            with _said_in_one_line("read", path):
                size = path.stat().st_size
            if size != wanted:
                raise CheckpointError(f"{path} has {size} bytes, expected {wanted}: it is truncated or another file")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads slices, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._file(item.storage_index), []).append(item)
        for file, items in by_file.items():
            path = self.checkpoint / file
            with _said_in_one_line("read", path), safe_open(path, framework="pt") as opened:
                for item in items:
                    target = planner.resolve_tensor(item)
                    target.copy_(self._read(path, opened, item, target.dtype))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Called when DCP is to choose a reader, which it is not."""
        return False

    def _file(self, index: MetadataIndex) -> str:
        # DCP's index counts the saved parts.
        return self.manifest.leaves[index.fqn].parts[index.index or 0].file

    def _read(self, path: Path, opened: Any, item: ReadItem, dtype: torch.dtype) -> Tensor:
        name = item.storage_index.fqn
        box = self.manifest.leaves[name].parts[item.storage_index.index or 0]
        stored = opened.get_slice(name)
        if tuple(stored.get_shape()) != box.sizes:
            raise CheckpointError(f"{path}: leaf {name!r} has shape {tuple(stored.get_shape())}, expected {box.sizes}")
        if not box.sizes:
            tensor = opened.get_tensor(name)  # there are no slices of a scalar
        else:
            begins = zip(item.storage_offsets, item.lengths, strict=True)
            tensor = stored[tuple(slice(begin, begin + length) for begin, length in begins)]
        if tensor.dtype != dtype:
            raise CheckpointError(f"{path}: leaf {name!r} has dtype {dtype_name(tensor)}, expected {dtype}")
        return tensor  # type: ignore[no-any-return]


def _is_partial(path: Path) -> bool:
    return _PARTIAL_NAME.fullmatch(path.name) is not None


def _chunk(part: LocalPart) -> ChunkStorageMetadata:
    """DCP's word for the same."""
    return ChunkStorageMetadata(part.offsets, part.tensor.shape)


def _write_item(name: str, part: LocalPart) -> WriteItem:
    data = TensorWriteData(_chunk(part), TensorProperties(part.tensor.dtype), part.shape)
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest_text(manifest).encode()).hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _said_in_one_line(what: str, path: Path) -> Any:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot {what} {path}: {reason}") from error
