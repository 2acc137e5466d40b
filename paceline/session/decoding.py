"""Decoding of `paceline train`: the processes and devices that make a rank's batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.communicator import total
from paceline.config.data import MAX_DECODE_WORKERS
from paceline.config.train import TrainConfig
from paceline.data.batch_maker import BatchMaker, SwitchedBatches
from paceline.data.decoding.decode_pool import DecodeDevice, DecodePool
from paceline.data.decoding.host_batches import HostBatches
from paceline.data.gpu_decode.decoder import GpuBatchDecoder
from paceline.data.gpu_decode.device_batches import DecodeThread, DeviceBatches
from paceline.data.gpu_decode.file_maker import FileMaker
from paceline.data.gpu_decode.jpeg_decoder import TorchvisionDecoder
from paceline.data.gpu_decode.requirements import require_gpu_decoding
from paceline.data.loader import DatabaseLoader
from paceline.data.source import Source
from paceline.data.upload import Upload
from paceline.errors import ConfigError, Message, many
from paceline.generation.run import Run
from paceline.run.extension import Extension
from paceline.session.sources import cores_per_worker, order_of
from paceline.wiring.samples import normalisation, sample_maker


class Decoding:
    """Decoding of a rank's batches, of training and evaluation: by processes, a GPU, or both.

    Args:
        config: the run's.
        run: the run, whose recorder receives notes.
        device: where batches go.
        chosen: the device that a resumed run has chosen to decode on; empty: none.

    Attributes:
        pool: the decode processes.
        present: where images are decoded.
        tries: whether both devices are to be measured.

    Raises:
        ConfigError: images can't be decoded on the GPU, as asked for.
    """

    def __init__(
        self, config: TrainConfig, run: Run, device: torch.device, chosen: str = ""
    ) -> None:
        self._config = config
        self._run = run
        self._device = device
        given = config.data.decode_device
        self.tries = given == "auto" and not chosen
        self._gpu = "cuda" in (given, chosen) or self.tries
        if self._gpu and not self._all_can_use_gpu(given, chosen):
            self._gpu = False
            self.tries = False
            chosen = "cpu"
        self.present = DecodeDevice(
            chosen or ("cuda" if self._gpu else "cpu"), measured=given == "auto"
        )
        self._thread = DecodeThread() if self._gpu else None
        group = run.context.world
        # One core is the training process's own.
        limit = min(cores_per_worker(group.local_world_size) - 1, MAX_DECODE_WORKERS)
        workers = config.data.fixed_decode_workers
        if workers is None and self.tries:
            workers = limit
        elif workers is None and self._gpu:
            workers = min(limit, 1)  # which reads as fast as a GPU decodes
        self.pool = DecodePool(
            workers,
            cuda=device.type == "cuda",
            limit=limit,
            device=self.present,
            recorder=run.recorder,
            process=f"Rank {group.rank}",
        )

    def loader(
        self, source: Source, *, train: bool, extensions: Sequence[Extension] = ()
    ) -> DatabaseLoader:
        """Make the loader of a source, in the order of training or of evaluation.

        Args:
            source: the records.
            train: shuffled, of another selection each epoch, and augmented; or as evaluation wants
                it.
            extensions: of the samples.

        Raises:
            ConfigError: fewer samples than workers.
        """
        data = self._config.data
        data_group = self._run.context.along("data")
        order = order_of(self._config, len(source), train=train)
        if train and order.samples < data_group.size:
            raise ConfigError(
                f"--train_data {data.train_data}: {many(order.samples, 'sample')} for "
                f"{data_group.size} workers; at least one sample per worker is needed."
            )
        maker = self._maker(source, extensions, train=train)
        return DatabaseLoader(
            order,
            maker,
            skip_bad=data.bad_records == "skip",
            recorder=self._run.recorder,
        )

    def close(self) -> None:
        """End the decode processes and the thread."""
        if self._thread is not None:
            self._thread.close()
        self.pool.close()

    def _maker(self, source: Source, extensions: Sequence[Extension], *, train: bool) -> BatchMaker:
        data = self._config.data
        maker = sample_maker(data, source, train=train, seed=self._config.optim.seed)
        pixels = normalisation(data, self._device, channels_last=self._config.model.channels_last)
        width = data.image_size
        upload = Upload(**pixels, channels=data.num_channels, width=width)
        extended = maker
        for extension in extensions:
            extended = extension.maker(extended)
        cpu = HostBatches(self.pool, extended, upload)
        if self._thread is None:
            return cpu
        # torchvision is imported only where the GPU decodes.
        jpeg = TorchvisionDecoder(channels=data.num_channels, device=self._device)
        decoder = GpuBatchDecoder(maker, **pixels, jpeg=jpeg)
        cuda = DeviceBatches(self.pool, FileMaker(**vars(maker)), decoder, self._thread)
        return SwitchedBatches(self.present, cpu, cuda)

    def _all_can_use_gpu(self, given: str, chosen: str) -> bool:
        """Return whether the GPUs of all ranks can decode; collective with `auto`."""
        can = self._can_use_gpu(given, chosen)
        if given != "auto":
            return can
        count = torch.tensor([can], dtype=torch.float64)
        context = self._run.context
        return (
            total(context.group("all", "steps"), count, "the number of GPUs that can decode").item()
            == context.world.size
        )

    def _can_use_gpu(self, given: str, chosen: str) -> bool:
        """Return whether the GPU can decode; raise, or note, that it can't."""
        try:
            if self._device.type != "cuda":
                raise no_gpu(given)
            require_gpu_decoding(given)
        except ConfigError as error:
            if given == "cuda":
                raise
            changed = ", unlike before; its pixels differ slightly" if chosen else ""
            text = f"Images are decoded by cpu{changed}. {error}"
            self._run.recorder.event("note", text=text)
            return False
        return True


def no_gpu(given: str) -> ConfigError:
    """Return the error of a `--decode_device` that needs the GPU of a worker that has none."""
    return ConfigError(
        flag="decode_device",
        value=given,
        rule="a GPU decodes only for the training on it, and this worker trains on a CPU",
        remedy=Message("leave out {--decode_device}"),
    )
