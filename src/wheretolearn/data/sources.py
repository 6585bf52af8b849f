"""Where each known image set comes from: addresses, checksums, licence, canonical form and class splits."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path

from wheretolearn.data.archives import Workspace
from wheretolearn.data.download import RemoteFile
from wheretolearn.data.image_set import check_name
from wheretolearn.data.readers import (
    CIFAR10_CLASSES,
    Reader,
    Splits,
    read_cifar10,
    read_class_folders,
    read_idx,
    read_mini_imagenet,
    read_omniglot,
    read_sorted_classes,
)
from wheretolearn.errors import DataError

INK = "ink 255 on 0"
COLOUR = "RGB, 0 to 255"
CARS_TRAIN_CLASSES = 147


@dataclass(frozen=True)
class Source:
    """One published image set."""

    name: str
    title: str
    licence: str
    home: str
    image_shape: tuple[int, int, int]  # canonical height, width, channels
    convention: str  # what pixel values mean
    split_classes: Mapping[str, int]  # classes of each split when complete
    classes: int  # distinct classes of the complete set
    images: int  # images of the complete set
    read: Reader
    layout: str  # what `data add` expects to find
    files: tuple[RemoteFile, ...] = ()
    obtain: str = ""  # how to get it where it cannot be downloaded freely
    note: str = ""


def find(name: str) -> Source:
    """The source of a known set; an unknown name gets the nearest known one."""
    if name in SOURCES:
        return SOURCES[name]
    check_name(name)
    close = difflib.get_close_matches(name, SOURCES, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise DataError(
        f"no known image set is called {name!r}{hint} Known: {', '.join(SOURCES)}.\n"
        f"For images of your own: `wheretolearn data add {name} FOLDER`, with one sub-folder per class."
    )


def cub_split(class_name: str) -> str:
    """The few-shot split of a CUB class folder such as ``004.Groove_billed_Ani``.

    By index from 0: even ones train, then alternately validation and test.
    """
    number = class_name.partition(".")[0]
    if not number.isdigit() or not 1 <= int(number) <= 200:
        raise DataError(f"{class_name!r} is not a class folder of CUB-200-2011 (001.Black_footed_Albatross ...)")
    return ("train", "validation", "train", "test")[(int(number) - 1) % 4]


def cars_split(class_name: str) -> str:
    """``test`` for the 49 test classes of the few-shot split of Cars, ``train`` for all others."""
    return "test" if _letters(class_name) in map(_letters, cars_test_classes()) else "train"


def read_cars(folder: Path, workspace: Workspace) -> Splits:
    """Cars by class folders, refused where test classes seem to be spelled otherwise: they would be trained on."""
    splits = read_sorted_classes(folder, workspace, size=84, inner=("cars", "car_data"), split_of=cars_split)
    train, test = (len(splits[split].classes) if split in splits else 0 for split in ("train", "test"))
    # A quarter of all classes are test classes; of a subset perhaps fewer.
    if train > CARS_TRAIN_CLASSES or 10 * test < train + test:
        raise DataError(
            f"{folder} holds {train + test} classes, but only {test} of the {len(cars_test_classes())} test classes "
            f"of Cars.\nName its folders as its publisher does, for example {sorted(cars_test_classes())[0]!r}."
        )
    return splits


def _letters(class_name: str) -> str:
    """A class name less what copies change in it: ``Ram C/V`` is ``Ram C-V`` in a folder."""
    return re.sub("[^a-z0-9]", "", class_name.lower())


@cache
def cars_test_classes() -> frozenset[str]:
    """The names of the 49 test classes."""
    text = (resources.files("wheretolearn.data") / "splits" / "cars-test.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))


def _mirrored(name: str, size: int, sha256: str, *bases: str) -> RemoteFile:
    return RemoteFile(name, tuple(base + name for base in bases), size, sha256)


MNIST_BASES = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
FASHION_BASES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
OMNIGLOT_BASES = (
    "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
    "https://github.com/brendenlake/omniglot/raw/master/python/",
)
IDX_LAYOUT = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the two t10k files"
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
IMAGENET_TERMS = "ImageNet terms: non-commercial research and education"

_ALL = (
    Source(
        name="mnist",
        title="MNIST handwritten digits",
        licence="CC BY-SA 3.0 as commonly stated; cite LeCun et al. 1998",
        home="http://yann.lecun.com/exdb/mnist/",
        image_shape=(28, 28, 1),
        convention=INK,
        split_classes={"train": 10, "test": 10},
        classes=10,
        images=70_000,
        read=partial(read_idx, classes=[str(digit) for digit in range(10)]),
        layout=IDX_LAYOUT,
        files=(
            _mirrored(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                *MNIST_BASES,
            ),
            _mirrored(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                *MNIST_BASES,
            ),
            _mirrored(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                *MNIST_BASES,
            ),
            _mirrored(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                *MNIST_BASES,
            ),
        ),
    ),
    Source(
        name="fashion-mnist",
        title="Fashion-MNIST clothing",
        licence="MIT",
        home="https://github.com/zalandoresearch/fashion-mnist",
        image_shape=(28, 28, 1),
        convention="garment bright on 0",
        split_classes={"train": 10, "test": 10},
        classes=10,
        images=70_000,
        read=partial(read_idx, classes=FASHION_CLASSES),
        layout=IDX_LAYOUT,
        files=(
            _mirrored(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                *FASHION_BASES,
            ),
            _mirrored(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                *FASHION_BASES,
            ),
            _mirrored(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                *FASHION_BASES,
            ),
            _mirrored(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                *FASHION_BASES,
            ),
        ),
    ),
    Source(
        name="omniglot",
        title="Omniglot handwritten characters of 50 alphabets",
        licence="MIT",
        home="https://github.com/brendenlake/omniglot",
        image_shape=(28, 28, 1),
        convention=f"{INK}; area average of 105 by 105",
        split_classes={"background": 964, "evaluation": 659},
        classes=1623,
        images=32_460,
        read=partial(read_omniglot, size=28),
        layout="images_background.zip and images_evaluation.zip, or the folders in them",
        files=(
            _mirrored(
                "images_background.zip",
                9_464_212,
                "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
                *OMNIGLOT_BASES,
            ),
            _mirrored(
                "images_evaluation.zip",
                6_462_886,
                "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
                *OMNIGLOT_BASES,
            ),
        ),
    ),
    Source(
        name="cifar10",
        title="CIFAR-10 small photographs",
        licence="none stated; cite Krizhevsky 2009",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        image_shape=(32, 32, 3),
        convention=COLOUR,
        split_classes={"train": len(CIFAR10_CLASSES), "test": len(CIFAR10_CLASSES)},
        classes=len(CIFAR10_CLASSES),
        images=60_000,
        read=read_cifar10,
        layout="cifar-10-batches-bin/ or cifar-10-batches-py/, or their tar.gz",
        files=(
            _mirrored(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                "https://www.cs.toronto.edu/~kriz/",
            ),
        ),
    ),
    Source(
        name="mini-imagenet",
        title="miniImageNet, the split of Ravi and Larochelle",
        licence=IMAGENET_TERMS,
        home="https://github.com/twitter-research/meta-learning-lstm",
        image_shape=(84, 84, 3),
        convention=COLOUR,
        split_classes={"train": 64, "validation": 16, "test": 20},
        classes=100,
        images=60_000,
        read=partial(read_mini_imagenet, size=84),
        layout="images/ with train.csv, val.csv and test.csv, or train/, val/ and test/ of class folders",
        obtain="make it from your copy of ImageNet (ILSVRC-2012) with the csv files of its authors",
    ),
    Source(
        name="cub",
        title="CUB-200-2011 birds",
        licence="non-commercial research and education",
        home="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        image_shape=(84, 84, 3),
        convention=f"{COLOUR}; squashed to a square",
        split_classes={"train": 100, "validation": 50, "test": 50},
        classes=200,
        images=11_788,
        read=partial(
            read_sorted_classes,
            size=84,
            inner=("CUB_200_2011.tgz", "CUB_200_2011", "images"),
            split_of=cub_split,
        ),
        layout="CUB_200_2011/images/ with its class folders, or CUB_200_2011.tgz",
        files=(
            _mirrored(
                "CUB_200_2011.tgz",
                1_150_585_339,
                "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
                "https://data.caltech.edu/records/65de6-vp158/files/",
            ),
        ),
    ),
    Source(
        name="cars",
        title="Stanford Cars",
        licence="non-commercial research",
        home="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        image_shape=(84, 84, 3),
        convention=f"{COLOUR}; squashed to a square",
        split_classes={"train": CARS_TRAIN_CLASSES, "test": 49},
        classes=196,
        images=16_185,
        read=read_cars,
        layout="one folder of images per class, named as in `Acura TL Type-S 2008`",
        obtain="its publisher's server is closed; sort a copy of the images into one folder per class",
        note="the 49 test classes of the few-shot split are `test`, all others `train`",
    ),
    Source(
        name="tiered-imagenet",
        title="tieredImageNet",
        licence=IMAGENET_TERMS,
        home="https://github.com/renmengye/few-shot-ssl-public",
        image_shape=(84, 84, 3),
        convention=f"{COLOUR}; squashed to a square",
        split_classes={"train": 351, "validation": 97, "test": 160},
        classes=608,
        images=779_165,
        read=partial(read_class_folders, image_shape=(84, 84, 3), split_names=("train", "validation", "test")),
        layout="train/, val/ and test/ (or some of them) with one folder of images per class",
        obtain="make it from your copy of ImageNet (ILSVRC-2012) with the class lists of its authors",
    ),
)
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
