"""The image data sets: addresses, files and digests.

`md5` is of a file as published, `sha256` of its decompressed contents, computed from copies that agree with the
published MD5 or with other public listings. For KMNIST only the MD5 is known, so an unzipped copy cannot be checked.
CIFAR-100 is also recognised by its rows in any order (see `files.DataFile`).
"""

from __future__ import annotations

from credo.data.files import DataFile, DatasetSpec, Download
from credo.data.formats.cifar import CIFAR10_LAYOUTS, CIFAR100_LAYOUTS, CifarLayout, load_cifar10, load_cifar100
from credo.data.formats.idx import load_idx

_IDX_NAMES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"


def _idx_spec(title: str, url: str, md5: tuple[str, ...], sha256: tuple[str, ...] = ()) -> DatasetSpec:
    """Describe MNIST's four files; with two digests only the test files are required."""
    names = _IDX_NAMES[-len(md5) :]
    digests = [f"md5:{one}" for one in md5], [f"sha256:{one}" for one in sha256]
    proofs = dict(zip(names, zip(*(kind for kind in digests if kind), strict=True), strict=True))
    files = tuple(DataFile(name, proofs.get(name, ()), zipped=True, optional=name not in names) for name in _IDX_NAMES)
    downloads = tuple(Download(f"{url}{name}.gz", one) for name, one in zip(names, md5, strict=True))
    return DatasetSpec(title, "classification", load_idx, url, (files,), downloads)


def _cifar_files(layout: CifarLayout, *digests: tuple[str, ...]) -> tuple[DataFile, ...]:
    return tuple(DataFile(path, found) for path, found in zip(layout.files, digests, strict=True))


# The author's own page blocks downloads by programs; this copy has the same bytes.
MNIST = _idx_spec(
    "MNIST, handwritten digits (LeCun et al., 1998)",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
# The authors' repository: their other address has no https.
FASHION_MNIST = _idx_spec(
    "Fashion-MNIST, clothes (Xiao et al., 2017)",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
KMNIST = _idx_spec(
    "Kuzushiji-MNIST, Japanese characters (Clanuwat et al., 2018)",
    "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    (
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
)
NOTMNIST = _idx_spec(
    "notMNIST, letters A to J in many fonts (Bulatov, 2011), out of distribution for MNIST",
    "https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/",
    ("2c87c839a4ef9b238846600eec8c35b7", "7ea9118cbafd0f6e3ee2ad771d782a01"),
    (
        "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
        "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
    ),
)
CIFAR10 = DatasetSpec(
    "CIFAR-10, small colour photographs (Krizhevsky, 2009)",
    "classification",
    load_cifar10,
    _CIFAR_URL,
    (
        _cifar_files(
            CIFAR10_LAYOUTS[0],
            ("md5:5dd7e06a14cb22eb9f671a540d1b7c25",),
            ("md5:5ea93a67294ea407fff1d09f752e9692",),
            ("md5:942cd6a4bcdd0dd3c604fbe906cb4421",),
            ("md5:ae636b3ba5c66a11e91e8cb52e771fcb",),
            ("md5:53f37980c15c3d472c316c40844f3f0d",),
            ("md5:803d5f7f4d78ea53de84dbe85f74fb6d",),
        ),
        _cifar_files(
            CIFAR10_LAYOUTS[1],
            ("md5:c99cafc152244af753f735de768cd75f",),
            ("md5:d4bba439e000b95fd0a9bffe97cbabec",),
            ("md5:54ebc095f3ab1f0389bbae665268c751",),
            ("md5:634d18415352ddfa80567beed471001a",),
            ("md5:482c414d41f54cd18b22e5b47cb7c3cb",),
            ("md5:40351d587109b95175f43aff81a1287e",),
        ),
    ),
    (Download(f"{_CIFAR_URL}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", CIFAR10_LAYOUTS[0].files),),
)
CIFAR100 = DatasetSpec(
    "CIFAR-100, small colour photographs in a hundred classes (Krizhevsky, 2009)",
    "classification",
    load_cifar100,
    _CIFAR_URL,
    (
        _cifar_files(
            CIFAR100_LAYOUTS[0],
            (
                "md5:6172c7755cfe09b2fe270c85cebc1b15",
                "cifar100:6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
            ),
            (
                "md5:4499cfba6c016c1be1438163640a0898",
                "cifar100:381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
            ),
        ),
        _cifar_files(
            CIFAR100_LAYOUTS[1],
            ("md5:16019d7e3df5f24257cddd939b257f8d",),
            ("md5:f0ef6b0ae62326f3e7ffdfab6717acfc",),
        ),
    ),
    (Download(f"{_CIFAR_URL}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", CIFAR100_LAYOUTS[0].files),),
)
