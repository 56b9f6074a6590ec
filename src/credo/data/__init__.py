"""Data sets in memory and batches of them: toy data, idx and CIFAR files, tables."""

from credo.data.augment import AUGMENTATIONS, Augment, augment_flip, augment_flip_crop
from credo.data.batches import Batches, as_float
from credo.data.corruptions.registry import CORRUPTIONS, SEVERITIES, Corruption, corrupt, corruption_kinds
from credo.data.download import download
from credo.data.errors import DataCorruptError, DataMissingError, DownloadError
from credo.data.files import DataFile, DatasetSpec, Download, data_root
from credo.data.registry import DATASETS, dataset_names, load_dataset
from credo.data.splits import Dataset, Split, split_validation
from credo.data.status import DatasetStatus, FileStatus, data_status, dataset_status
from credo.data.with_length import WithLength

__all__ = [
    "AUGMENTATIONS",
    "CORRUPTIONS",
    "DATASETS",
    "SEVERITIES",
    "Augment",
    "Batches",
    "Corruption",
    "DataCorruptError",
    "DataFile",
    "DataMissingError",
    "Dataset",
    "DatasetSpec",
    "DatasetStatus",
    "Download",
    "DownloadError",
    "FileStatus",
    "Split",
    "WithLength",
    "as_float",
    "augment_flip",
    "augment_flip_crop",
    "corrupt",
    "corruption_kinds",
    "data_root",
    "data_status",
    "dataset_names",
    "dataset_status",
    "download",
    "load_dataset",
    "split_validation",
]
