"""The command line: one line for each mistake, the right exit status, names, help, sweeps."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml

from embedx import __version__, cli, derived, jobs, said, stages, store
from embedx.cli import FLAGS, STAGES
from embedx.configs import Configs, conf_dir, override, public_config
from embedx.errors import ConfigError
from tests.conftest import embeddings_file, projection_file

Here = Callable[..., tuple[int, list[str], list[str]]]
Run = Callable[..., object]

TINY = ("model=mobilenet_v3_small", "model.weights=null", "model.input_size=64", "data.limit=12")

# Command line -> exit status and the one line it must end with.
MISTAKES = {
    "extrct": (2, r"ConfigError: there is no stage 'extrct'; .* the nearest is extract"),
    "--bogus": (2, r"ConfigError: there is no flag '--bogus'; a stage comes first, one of run, .*"),
    "-m extract": (2, r"ConfigError: -m comes after the stage: python -m embedx extract -m"),
    "extract model=mobilenet_v3_small --multi-run": (
        2,
        r"ConfigError: there is no flag '--multi-run'; the nearest is --multirun, and .* --help",
    ),
    "extract": (1, r"ConfigError: extract needs a model: pass model=NAME, one of alexnet, .*"),
    "layers": (1, r"ConfigError: layers needs a model: pass model=NAME, one of alexnet, .*"),
    "run data=digits": (1, r"ConfigError: run needs a model: .*"),
    "info": (1, r"DataError: there are no embeddings below outputs/ yet; .*"),
    "extract model=mobilenet_v3_small data.root=x": (
        1,
        r"ConfigError: there is no key 'data.root'; .*; data.root belongs to data=.*folder.*",
    ),
    "extract model=own model._target_=torch.nn.Identity model.depth=3": (
        1,
        r"ConfigError: there is no key 'model.depth'; .* is new: \+model.depth=\.\.\.",
    ),
    "extract model=resnet19": (
        1,
        r"ConfigError: there is no model 'resnet19'; the nearest are resnet18, resnet50, .*",
    ),
    "extract +model=resnet19": (1, r"ConfigError: there is no model 'resnet19'; .*"),
    "extract model=resnet18 data=folders": (
        1,
        r"ConfigError: there is no data 'folders'; the nearest are folder, .*",
    ),
    "project projection=umapp embeddings=x": (
        1,
        r"ConfigError: there is no projection 'umapp'; the nearest are umap, .*",
    ),
    "extract model=resnet18 bach_size=3": (
        1,
        r"ConfigError: there is no key 'bach_size'; the nearest are batch_size, .*",
    ),
    "extract model=resnet18 model.weigths=null": (
        1,
        r"ConfigError: there is no key 'model.weigths'; the nearest are model.weights, .*",
    ),
    "extract model=resnet18 +model.weigths=null": (
        1,
        r"ConfigError: there is no key 'model.weigths'; the nearest are model.weights, .*",
    ),
    "extract model=resnet18 +bach_size=3": (
        1,
        r"ConfigError: there is no key 'bach_size'; the nearest are batch_size, .*",
    ),
    "extract +experiment=demo bach_size=3": (
        1,
        r"ConfigError: there is no key 'bach_size'; the nearest are batch_size, .*",
    ),
    "extract model=resnet18 batch_size=many": (
        1,
        r"ConfigError: batch_size must be a whole number or null, not 'many'",
    ),
    "extract model=resnet18 batch_size=true": (
        1,
        r"ConfigError: batch_size must be a whole number or null, not true",
    ),
    "extract model=mobilenet_v3_small model.weights=null batch_size=-1": (
        1,
        r"ConfigError: batch_size must be at least 1 .*, not -1",
    ),
    "extract model=resnet18 save_outputs=maybe": (
        1,
        r"ConfigError: save_outputs must be true or false, not 'maybe'",
    ),
    "extract model=resnet18 precision=fp8": (
        1,
        r"ConfigError: precision must be one of fp32, tf32, bf16, fp16, not 'fp8'; the nearest .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null layers=5": (
        1,
        r"LayerError: MobileNetV3 has no layer '5'; the nearest of its .*",
    ),
    "extract model=resnet18 name=5": (
        1,
        r"ConfigError: name must be a text or null, not 5; a number that is a text is quoted: .*",
    ),
    "extract model=resnet18 model.input_size=big": (
        1,
        r"ConfigError: model.input_size must be a whole number or null, not 'big'",
    ),
    "extract model=resnet18 data.limit=0": (1, r"ConfigError: data.limit must be at least 1, .*"),
    "extract model=mobilenet_v3_small model.weights=null model.input_size=0": (
        1,
        r"ConfigError: pictures are resized to 0 px and cut to 0: make both at least 1 px, and .*",
    ),
    "extract model=alexnet model.weights=null model.input_size=8 data.limit=2": (
        1,
        r"ModelError: alexnet failed on a batch of shape \(2, 3, 8, 8\): RuntimeError: .*",
    ),
    "extract model=mobilenet_v3_small model.weights=NONE": (
        1,
        r"ModelError: mobilenet_v3_small has no weights 'NONE'; choose DEFAULT, .*, or null .*",
    ),
    "extract model=mobilenet_v3_small model.checkpoint=no.pth": (
        1,
        r"ModelError: the checkpoint no.pth is not there; check model.checkpoint",
    ),
    "extract model=mobilenet_v3_small model.weights=null layers=layer9": (
        1,
        r"LayerError: MobileNetV3 has no layer 'layer9'; the nearest of its 2\d\d layers are .*; "
        r"list them with: python -m embedx layers model=mobilenet_v3_small",
    ),
    "extract model=mobilenet_v3_small model.weights=null layers=[features,clasifier]": (
        1,
        r"LayerError: MobileNetV3 has no layer 'clasifier'; the nearest .* are classifier, .*",
    ),
    "extract model=mobilenet_v3_small pooling={_target_:embedx.pooling.gem,q:4}": (
        1,
        r"ConfigError: there is no key 'pooling.q'; the nearest are pooling.p, pooling.eps",
    ),
    "extract model=mobilenet_v3_small pooling={p:4}": (
        1,
        r"ConfigError: pooling={'p': 4} has no _target_; name a function of an activation",
    ),
    "extract model=mobilenet_v3_small pooling=[{_target_:nope.pool}]": (
        1,
        r"ConfigError: pooling._target_=nope.pool cannot be imported .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null pooling=gab": (
        1,
        r"ConfigError: pooling 'gab' is not known; choose one of: auto, none, .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null device=cuda:9": (
        1,
        r"ConfigError: device 'cuda:9' is not on this machine; choose auto or one of: cpu.*",
    ),
    "extract model=mobilenet_v3_small data=folder": (
        1,
        r"ConfigError: extract needs data.root: pass data.root=VALUE",
    ),
    "extract model=mobilenet_v3_small data=folder data.root=nope": (
        1,
        r"DataError: data.root nope is not there; name a folder of pictures",
    ),
    "extract model=mobilenet_v3_small data=folder data.root=empty": (
        1,
        r"DataError: data.root empty holds no picture .*",
    ),
    "extract model=mobilenet_v3_small data=folder data.root=file.txt": (
        1,
        r"DataError: data.root file.txt is not a folder; .*",
    ),
    "extract model=own": (1, r"ConfigError: extract needs model._target_: pass .*"),
    "extract model=own model._target_=nope.make": (
        1,
        r"ConfigError: model._target_=nope.make cannot be imported .*No module named 'nope'\); .*",
    ),
    "extract model=own model._target_=make": (
        1,
        r"ConfigError: model._target_=make cannot be imported .*",
    ),
    "extract model=own model._target_=torch.pi": (
        1,
        r"ConfigError: model._target_=torch.pi is a float, not a callable; name a function .*",
    ),
    "extract model=own model._target_=torch.nn.Linear": (
        1,
        r"ModelError: torch.nn.modules.linear.Linear: missing a required argument: .*\+model.KEY.*",
    ),
    "extract model=mobilenet_v3_small data=folder data.root=a=b,c": (
        1,
        r"ConfigError: .*'data.root=\"a=b,c\"'.*",
    ),
    "extract model=resnet18,alexnet": (
        1,
        r"ConfigError: model=resnet18,alexnet could be a sweep.* -m for a sweep.*",
    ),
    "extract model": (1, r"ConfigError: 'model' is not KEY=VALUE; .*"),
    "extract model=null": (1, r"ConfigError: model must be one of alexnet, .*, not 'null'"),
    "extract model=mobilenet_v3_small data=null": (
        1,
        r"ConfigError: data must be one of .*digits, .*",
    ),
    "extract model=mobilenet_v3_small ~layers": (
        1,
        r"ConfigError: ~layers takes away what extract needs.*",
    ),
    "extract model=mobilenet_v3_small +method=x": (1, r"ConfigError: there is no key 'method'; .*"),
    "extract model=mobilenet_v3_small +config={a:1}": (
        1,
        r"ConfigError: there is no key 'config'; .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null model.layer=zz": (
        1,
        r"LayerError: MobileNetV3 has no layer 'zz'; .*",
    ),
    "layers model=mobilenet_v3_small model.weights=null model.layer=zz": (
        1,
        r"LayerError: MobileNetV3 has no layer 'zz'; .*",
    ),
    "layers model=alexnet model.weights=null model.input_size=8": (
        1,
        r"ModelError: alexnet failed on a batch of shape \(1, 3, 8, 8\): RuntimeError: .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null model.seed=99999999999999999999999": (
        1,
        r"ConfigError: model.seed must be 0 to 2\*\*63 - 1, not 9+",
    ),
    "extract model=mobilenet_v3_small model.weights=null batch_size=99999999999999999999": (
        1,
        r"ConfigError: batch_size must be at least 1 .*, not 9+",
    ),
    "extract model=mobilenet_v3_small data._target_=embedx.data.folder data.limit=3": (
        1,
        r"ConfigError: embedx.data.folder: missing a required argument: 'root'",
    ),
    "extract model=mobilenet_v3_small data=folder data.root=": (
        1,
        r"ConfigError: data.root must be a text, not ''|DataError: data.root is empty; .*",
    ),
    "extract model=mobilenet_v3_small model.weights=null data.limit=2 out=file.txt": (
        1,
        r"StoreError: file.txt is a file, and a folder is needed; choose another out",
    ),
    "extract model=mobilenet_v3_small model.weights=null data.limit=2 out=/dev/null/x": (
        1,
        r"StoreError: /dev/null is a file, and a folder is needed; choose another out",
    ),
    f"extract model=mobilenet_v3_small model.weights=null data.limit=2 name={'n' * 300}": (
        1,
        r"StoreError: cannot (use|write) outputs/n+.*: File name too long; .*",
    ),
    "extract model=own model._target_=broken.make": (
        1,
        r"ConfigError: model._target_=broken.make cannot be imported \(SyntaxError: .*",
    ),
    "extract model=own model._target_=leaves.make": (
        1,
        r"ModelError: leaves.make raised SystemExit: 3 \(leaves.py, line 2\)",
    ),
    "extract model=own model._target_=torch.nn.Identity model.std=[0,1,1]": (
        1,
        r"ConfigError: model.std must be above 0, not \[0, 1, 1\]",
    ),
    "run projections=[] model=mobilenet_v3_small": (
        1,
        r"ConfigError: projections is empty; choose from .*",
    ),
    "run n_components=4 model=mobilenet_v3_small": (
        1,
        r"ConfigError: n_components must be one of 2, 3, .*",
    ),
    "run random_state=-1 model=mobilenet_v3_small": (
        1,
        r"ConfigError: random_state must be 0 to .*, not -1",
    ),
    "extract model=mobilenet_v3_small -m seed=1,2": (1, r"ConfigError: there is no key 'seed'; .*"),
    "project": (1, r"DataError: there are no embeddings below outputs/ yet; make some with: .*"),
    "view": (1, r"DataError: there are no embeddings below outputs/ yet; .*"),
    "project embeddings=nope.h5": (1, r"StoreError: there is no nope.h5; .*"),
    "project embeddings=file.txt": (1, r"StoreError: file.txt is not an HDF5 file; .*"),
    "evaluate embeddings=empty": (1, r"StoreError: there is no empty/embeddings.h5; .*"),
    "info path=file.txt": (1, r"StoreError: file.txt is not an HDF5 file; .*"),
    "project embeddings=x projection.n_neighbors=few": (
        1,
        r"ConfigError: projection.n_neighbors must be a whole number, not 'few'",
    ),
    "project embeddings=x projection=tsne projection.metric=cosin": (
        1,
        r"ConfigError: projection.metric must be one of euclidean, cosine, not 'cosin'; the near.*",
    ),
    "view embeddings=x viewer=webgl": (
        1,
        r"ConfigError: viewer must be one of map, report, "
        r"tensorboard, not 'webgl'; the nearest is .*",
    ),
    "view embeddings=x projections=umap": (
        1,
        r"ConfigError: projections must be a list of texts or null, not 'umap'.*",
    ),
    "run projections=[umap,pcaa] model=mobilenet_v3_small model.weights=null": (
        1,
        r"ConfigError: there is no projection 'pcaa'; the nearest are pca.*",
    ),
    "layers model=mobilenet_v3_small model.weights=null depth=-1": (
        1,
        r"ConfigError: depth must be 0 or more, not -1",
    ),
    "layers model=resnet19": (
        1,
        r"ConfigError: there is no model 'resnet19'; the nearest are resnet18, .*",
    ),
    "layers model=mobilenet_v3_small model.weights=null format=xml": (
        1,
        r"ConfigError: format must be one of tree, csv, json or null, not 'xml'.*",
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_nothing(
    line: str, embedx_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no-weights"))
    monkeypatch.setattr("torch.hub.download_url_to_file", _unreachable)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "leaves.py").write_text("def make():\n    raise SystemExit(3)\n")
    wanted, message = MISTAKES[line]
    status, _, err = embedx_here(*line.split(" "))
    assert status == wanted, err
    assert len(err) == 1, err
    assert re.fullmatch(message, err[0]), err[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        *("broken.py", "empty", "file.txt", "leaves.py"),
    ]


def _unreachable(*_: object, **__: object) -> None:
    raise OSError("no network in tests")


def test_the_flags_are_those_of_hydra() -> None:
    from hydra._internal.utils import get_args_parser

    actions = get_args_parser()._actions
    takes_value = {
        o: a.nargs is None and a.dest != "version" for a in actions for o in a.option_strings
    }
    assert takes_value.pop("--experimental-rerun")  # it would unpickle a file
    assert takes_value == FLAGS


@pytest.mark.parametrize(
    "spelling",
    ["model=mobilenet_v3_small", "+model=mobilenet_v3_small", "++model=mobilenet_v3_small"],
)
def test_both_spellings_of_model_work(spelling: str, embedx_here: Here, tmp_path: Path) -> None:
    status, out, err = embedx_here("extract", spelling, *TINY[1:])
    assert (status, err) == (0, [])
    path = next((tmp_path / "outputs").glob("mobilenet_v3_small-digits-*/embeddings.h5"))
    shown = path.relative_to(tmp_path)
    assert out[-1] == f"next: python -m embedx project projection=umap embeddings={shown}"
    assert any(line.startswith("mobilenet_v3_small has RANDOM weights (seed 0)") for line in out)
    assert any(line.endswith(f"into {shown}") and " on cpu " in line for line in out)
    assert re.search(r"12 rows, 0 failed, classifier.2 \(1024 float32\)", "\n".join(out))
    assert store.open(path).n_rows == 12


def test_names_tell_settings_apart_and_a_done_run_is_recognised(
    embedx_here: Here, tmp_path: Path, photos: Path
) -> None:
    def extract(*words: str) -> str:
        status, out, err = embedx_here("extract", *words)
        assert status == 0, err
        folder = shlex.split(out[-1].split("python -m ")[1])[-1].split("=")[1].strip('"')
        return Path(folder).parent.relative_to("outputs").as_posix()

    usual = ("model=mobilenet_v3_small", "model.weights=null", "model.input_size=64")
    limited = extract(*usual, "data.limit=12")
    assert re.fullmatch(r"mobilenet_v3_small-digits-[0-9a-f]{6}", limited)
    # What does not decide the rows does not enter the name.
    assert extract(*usual, "data.limit=12", "batch_size=5", "num_workers=1") == limited
    # Code of one's own may see a batch as a whole.
    own = ("model=own", "model._target_=torchvision.models.mobilenet_v3_small", "data.limit=2")
    own = (*own, "model.input_size=64")
    assert extract(*own, "batch_size=1") != extract(*own, "batch_size=2")
    assert extract(*usual, "data.limit=11") != limited
    assert extract(*usual, "data.limit=12", "layers=features") != limited
    folder = ("data=folder", "data.root=photos")
    here = extract(*usual, *folder)
    assert re.fullmatch(r"mobilenet_v3_small-photos-[0-9a-f]{6}", here)
    assert extract(*usual, *folder[:1], f"data.root={photos}") == here
    other = tmp_path / "else" / "photos"
    other.parent.mkdir()
    photos.rename(other)
    assert extract(*usual, *folder[:1], "data.root=else/photos") not in (here, limited)
    assert extract(*usual, "data.limit=12", 'name="my run/1"') == "my_x20_run_x2f_1"
    assert extract(*usual, "data.limit=12", 'name=".."') == "_x2e_."
    assert extract(*usual, "data.limit=12", 'name="日本"') == "日本"
    assert extract(*usual, "data.limit=12", "name=mine") == "mine"
    status, _, err = embedx_here("extract", *usual, "data.limit=9", "name=mine")
    assert status == 1
    assert re.fullmatch(
        r"StoreError: outputs/mine/embeddings.h5 holds another run: the data has changed since: "
        r"12 samples there and 9 here; choose another name or out folder, or replace it with "
        r"overwrite=true",
        err[-1],
    )
    assert extract(*usual, "data.limit=9", "name=mine", "overwrite=true") == "mine"
    assert not (tmp_path / "multirun").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "else"}


def test_the_plain_name_belongs_to_default_settings(
    embedx_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from embedx import models

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    cache = tmp_path / "home" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    module = models.torchvision("resnet18", weights=None).module
    torch.save(module.state_dict(), cache / "resnet18-f37072fd.pth")
    (tmp_path / "photos").mkdir()
    from PIL import Image

    Image.new("RGB", (30, 20), "red").save(tmp_path / "photos" / "a.png")
    status, out, err = embedx_here("extract", "model=resnet18", "data=folder", "data.root=photos")
    assert (status, err) == (0, [])
    assert (tmp_path / "outputs" / "resnet18-photos" / "embeddings.h5").exists()
    assert any("is not the file its name promises" in line for line in out)


def test_stages_work_on_the_newest_run_or_the_named_one(embedx_here: Here, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert embedx_here("extract", *TINY, f"name={name}")[0] == 0
    status, out, err = embedx_here("project", "projection=pca")
    assert (status, err) == (0, [])
    assert out[0] == "embeddings: the newest, outputs/b/embeddings.h5"
    assert out[-1] == "next: python -m embedx view embeddings=outputs/b/embeddings.h5"
    status, out, _ = embedx_here("project", "projection=pca", "embeddings=outputs/a")
    assert status == 0
    assert len(list((tmp_path / "outputs" / "a" / "projections").glob("pca-*.h5"))) == 1
    status, out, _ = embedx_here("project", "projection=pca", "embeddings=outputs/a")
    assert status == 0
    assert any("nothing to do" in line for line in out)
    status, out, err = embedx_here("evaluate", "embeddings=outputs/a")
    assert (status, err) == (0, [])
    scores = json.loads((tmp_path / "outputs" / "a" / "scores.json").read_text())["scores"]
    assert [row["kind"] for row in scores] == ["embeddings", "pca"]
    status, out, err = embedx_here("view", "embeddings=outputs/a", "color=none")
    assert (status, err) == (0, [])
    assert list((tmp_path / "outputs" / "a").glob("map-pca-*.png"))
    status, out, err = embedx_here("export", "embeddings=outputs/a")
    assert (status, err) == (0, [])
    assert (tmp_path / "outputs" / "a" / "projector" / "projector_config.pbtxt").exists()
    status, out, err = embedx_here("info", "path=outputs/a", "verify=true")
    assert (status, err) == (0, [])
    assert out[-1].split(maxsplit=1) == ["verified", "all 12 checksums match"]
    status, out, err = embedx_here("info", f"path={next(Path('outputs').rglob('pca-*.h5'))}")
    assert status == 0
    assert any(line.split() == ["method", "pca"] for line in out)


def test_a_help_says_which_options_have_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = Configs()
    cli._print_help("explain", configs)
    said = capsys.readouterr().out
    assert re.search(r"^  data\.key \(array\): ", said, re.M)
    assert re.search(r"^  data\.limit: ", said, re.M)  # all have it
    found = re.findall(r"^  (\w+)\.(\w+) \((.*?)\): ", said, re.M)
    assert len(found) > 8
    for group, key, options in found:
        having = [o for o in configs.options(group) if key in configs.explained_option(group, o)]
        assert sorted(options.split(", ")) == sorted(having)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("flag", ["--help", "--info=defaults"])
def test_every_stage_has_help_without_a_model_or_a_run(
    stage: str, flag: str, embedx_here: Here
) -> None:
    status, out, err = embedx_here(stage, flag)
    assert (status, err) == (0, [])
    if flag == "--help":
        text = "\n".join(out)
        assert STAGES[stage] in text
        document = yaml.safe_load((conf_dir() / f"{stage}.yaml").read_text())
        for key in set(document) - {"defaults"}:
            assert re.search(rf"^  {key}: ", text, re.M), f"{key} is not explained"
    assert list(Path.cwd().iterdir()) == []


def test_cfg_job_shows_the_composed_config(embedx_here: Here) -> None:
    status, out, err = embedx_here("extract", "+model=mobilenet_v3_small", "--cfg", "job")
    assert (status, err) == (0, [])
    shown = yaml.safe_load("\n".join(out))
    assert shown["model"]["layer"] == "classifier.2"
    assert shown["data"] == {"_target_": "embedx.data.digits", "limit": None}
    status, out, _ = embedx_here("extract", "+experiment=demo", "--cfg", "job")
    shown = yaml.safe_load("\n".join(out))
    assert (shown["name"], shown["model"]["name"]) == ("demo", "efficientnet_lite0")
    assert shown["model"]["input_size"] == 96


def test_every_config_file_composes_and_fits_the_function_it_calls() -> None:
    for group in ("model", "data", "projection", "exporter"):
        for name in Configs().options(group):
            node = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
            if node["_target_"] == "???":
                node["_target_"] = "torch.nn.Identity"
            node = {k: "x" if v == "???" else v for k, v in node.items()}
            jobs.call_of(node, group)


def test_paths_do_not_travel_with_a_file(embedx_here: Here, tmp_path: Path, photos: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def make(file):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))\n"
    )
    words = ("model=own", "model._target_=net.make", "+model.file=/secret/place/w.pt")
    folder = ("data=folder", f"data.root={photos}", "model.input_size=8", "name=x")
    status, _, err = embedx_here("extract", *words, *folder)
    assert (status, err) == (0, [])
    attrs = store.open(tmp_path / "outputs" / "x").attrs
    assert yaml.safe_load(attrs["config"])["data"]["root"] == "photos"
    assert yaml.safe_load(attrs["config"])["model"]["file"] == "w.pt"
    assert not re.search(r"secret|/tmp|photos/", str(attrs))
    kept = yaml.safe_load((tmp_path / "outputs" / "x" / "config.yaml").read_text())
    assert kept["data"]["root"] == str(photos)


def test_stopping_in_the_last_batch_stops_the_sweep(
    embedx_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopping.py").write_text(
        "import os, signal\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))\n"
        "    def forward(self, x):\n"
        "        if len(x) > 2:\n"  # not where two samples are looked at alone
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return self.body(x)\n"
    )
    words = (
        "model=own",
        "model._target_=stopping.Net",
        "model.input_size=8",
        "data.limit=4,5",
        "-m",
    )
    status, _, err = embedx_here("extract", *words)
    assert status == 130, err
    assert re.fullmatch(r"Interrupted: stopped by SIGINT when .* was complete", err[-1])
    assert len(list((tmp_path / "outputs").glob("own-*"))) == 1


def test_a_sweep_runs_every_job_and_names_the_one_that_failed(
    embedx_here: Here, tmp_path: Path
) -> None:
    sweep = ("extract", *TINY, "layers=features,nope,avgpool", "-m")
    status, out, err = embedx_here(*sweep)
    assert status == 1
    assert re.fullmatch(r"failed job 1: .*layers=nope.*", err[-2])
    assert err[-1].startswith("LayerError: MobileNetV3 has no layer 'nope'")
    files = sorted((tmp_path / "outputs").glob("mobilenet_v3_small-digits-*/embeddings.h5"))
    assert len(files) == 2
    assert {next(iter(store.open(f).embeddings)) for f in files} == {"features", "avgpool"}
    stamps = [f.stat().st_mtime_ns for f in files]
    status, out, err = embedx_here("extract", *TINY, "layers=features,avgpool,classifier.2", "-m")
    assert (status, err) == (0, [])
    assert sum("nothing to do" in line for line in out) == 2  # a wider sweep does what is missing
    assert [f.stat().st_mtime_ns for f in files] == stamps
    assert len(list((tmp_path / "outputs").glob("mobilenet_v3_small-digits-*"))) == 3


def test_a_sweep_over_models_takes_their_common_keys_and_refuses_a_wrong_one(
    embedx_here: Here, tmp_path: Path
) -> None:
    sweep = ("extract", "-m", "model=mobilenet_v3_small,resnet18", *TINY[1:])
    status, out, err = embedx_here(*sweep)
    assert (status, err) == (0, [])
    names = sorted(path.name[:9] for path in (tmp_path / "outputs").iterdir() if path.is_dir())
    assert names == ["mobilenet", "resnet18-"]
    status, _, err = embedx_here(*sweep, "model.inputsize=3")
    assert status == 1
    assert err[-1].startswith("ConfigError: there is no key 'model.inputsize'; the nearest are mod")
    status, _, err = embedx_here(*sweep, "bach_size=3")
    assert status == 1
    assert err[-1].startswith("ConfigError: there is no key 'bach_size'; the nearest are batch_siz")


def test_layers_are_listed_with_the_penultimate_marked(embedx_here: Here) -> None:
    status, out, err = embedx_here("layers", "model=mobilenet_v3_small", "model.weights=null")
    assert (status, err) == (0, [])
    table = [line.split() for line in out]
    (head,) = (row for row in table if row[0] == "classifier.3")
    assert head[1:8] == ["Linear", "1x1024", "1x1000", "1,025,000", "4.10", "MB", "1.02"]
    (marked,) = (row for row in table if "<-" in row)
    assert marked[:4] == ["classifier.2", "Dropout", "1x1024", "1x1024"]
    assert marked[-3:] == ["<-", "penultimate,", "classifier.2"]
    assert out[-3].startswith("mobilenet_v3_small: 208 layers, 2,542,856 parameters (2,542,856 tr")
    assert out[-1] == (
        "next: python -m embedx extract model=mobilenet_v3_small model.weights=null "
        "'layers=[classifier.2]'"
    )
    status, folded, _ = embedx_here(
        "layers", "model=mobilenet_v3_small", "model.weights=null", "depth=1"
    )
    (row,) = (line.split() for line in folded if line.startswith("  classifier"))
    assert row[:5] == ["classifier", "Sequential", "1x576", "1x1000", "1,615,848"]


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("layers=[1.10,a.b]", 'layers=["1.10","a.b"]'),
        ("layers=1.10", 'layers="1.10"'),
        ("layers=[0],[1.10,2]", 'layers=["0"],["1.10","2"]'),
        ("layers=layer4", "layers=layer4"),
        ("layers=['1.10',\"x\"]", "layers=['1.10',\"x\"]"),
        ("layers=[layer1.0.relu@1,fc:input]", 'layers=["layer1.0.relu@1","fc:input"]'),
        ("+model=mobilenet_v3_small", "model=mobilenet_v3_small"),
    ],
)
def test_what_hydra_would_misread_is_mended_before_it(typed: str, sent: str) -> None:
    assert cli._prepare("extract", [typed], Configs())[0] == sent


def test_keys_of_a_factory_that_are_also_ours_are_left_to_it_or_passed_on(
    embedx_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sharing.py").write_text(
        "from torch import nn\n"
        "def make(weights='none', seed=42, name='x'):\n"
        "    print('made with', weights, seed, name)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
    )
    words = ("model=own", "model._target_=sharing.make", "model.input_size=2")
    status, out, err = embedx_here("layers", *words, "+model.weights=here")
    assert (status, err) == (0, [])
    assert out[0] == "made with here 42 x"
    assert any(line.startswith("own: 2 layers") for line in out)
    status, out, err = embedx_here("layers", *words, "model.seed=0", "model.name=mine")
    assert (status, err) == (0, [])
    assert out[0] == "made with none 0 mine"
    assert any(line.startswith("mine: 2 layers") for line in out)


def test_a_model_of_ones_own_from_here(embedx_here: Here, tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n"
        "def make(depth, width=4):\n"
        "    body = [nn.Linear(192 if i == 0 else width, width) for i in range(depth)]\n"
        "    return nn.Sequential(nn.Flatten(), *body, nn.Linear(width, 2))\n"
    )
    words = ("model=own", "model._target_=mynet.make", "+model.depth=3", "model.input_size=8")
    status, out, err = embedx_here("extract", *words, "data.limit=7", "name=mine")
    assert (status, err) == (0, [])
    opened = store.open(tmp_path / "outputs" / "mine")
    assert opened.embeddings["4:input"].shape == (7, 4)
    status, out, err = embedx_here("extract", *words, "+model.hight=2", "data.limit=7")
    assert status == 1
    assert re.fullmatch(r"ModelError: mynet.make: got an unexpected keyword .*'hight'.*", err[-1])


def test_a_bug_of_ours_shows_its_traceback_and_a_mistake_does_not(
    embedx_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(stages._CALLS, "layers", broken)
    with pytest.raises(ZeroDivisionError):
        embedx_here("layers", "model=mobilenet_v3_small")


def test_text_from_data_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("embedx", 20, "", 0, "id \x1b[31mred\x07\r\n%s", ("x",), None)
    said.Lines().emit(record)
    assert capsys.readouterr().out == "id ?[31mred???x\n"


def test_as_a_process_it_prints_no_warning_and_ends_with_the_status(run: Run) -> None:
    done = run("extract", *TINY, "num_workers=1", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0
    assert done.stderr == ""
    assert run("info", "path=nope").returncode == 1


def test_the_version_is_that_of_the_package(embedx_here: Here) -> None:
    assert embedx_here("--version") == (0, [f"embedx {__version__}"], [])


# --------------------------------------------------------------------------- files of one's own


@pytest.fixture
def my_conf(tmp_path: Path) -> Path:
    """A folder of config files of a user's own: a model, a data source and a projection."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from torch import nn\n"
        "from embedx.methods import Result\n"
        "def net(depth):\n"
        "    body = [nn.Linear(12, 12) for _ in range(depth)]\n"
        "    return nn.Sequential(nn.Flatten(), *body, nn.Linear(12, 2))\n"
        "def rows(n):\n"
        "    return np.random.default_rng(0).normal(size=(n, 3, 2, 2)).astype('float32')\n"
        "def corner(activation):\n"
        "    return activation[:, :, 0, 0]\n"
        "def first(x, *, n_components=2):\n"
        "    return Result(x[:, :n_components])\n"
    )
    for name, text in {
        "model/net": "_target_: mine.net\ndepth: 1\n",
        "data/rows": "_target_: mine.rows\nn: 9\n",
        "projection/first": "_target_: mine.first\nn_components: 2\n",
    }.items():
        path = tmp_path / "my conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "my conf"


def test_a_model_data_and_a_projection_come_in_by_one_file_each(
    my_conf: Path, embedx_here: Here, tmp_path: Path
) -> None:
    mine = ("--config-dir", "my conf")
    status, out, err = embedx_here("extract", *mine, "model=net", "data=rows", "model.depth=2")
    assert (status, err) == (0, [])
    (run,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch("net-rows-[0-9a-f]{6}", run.name)
    opened = store.open(run)
    assert opened.embeddings["3:input"].shape == (9, 12)
    assert opened.attrs["model"] == "net"
    status, out, err = embedx_here(
        "project", *mine, "projection=first", "projection.n_components=3"
    )
    assert (status, err) == (0, [])
    (found,) = derived.projections_of(opened)
    assert (found.coords == opened.embeddings["3:input"][:, :3]).all()
    status, out, err = embedx_here("layers", *mine, "model=net", "+model.input_size=2")
    assert out[-1] == (
        "next: python -m embedx extract --config-dir 'my conf' model=net +model.input_size=2 "
        "'layers=[penultimate]'"
    )
    for words, message in {
        ("model=nett",): r"ConfigError: there is no model 'nett'; the nearest are net, .*",
        (
            "model=net",
            "model.dept=3",
        ): r"ConfigError: .*'model.dept'; the nearest are model.depth.*",
        (
            "model=net",
            "data=rows",
            "data.m=3",
        ): r"ConfigError: there is no key 'data.m'; .*data.n.*",
    }.items():
        status, _, err = embedx_here("extract", *mine, *words)
        assert status == 1
        assert re.fullmatch(message, err[-1]), err


def test_a_folder_of_config_files_that_cannot_be_used_is_one_line(
    my_conf: Path, embedx_here: Here
) -> None:
    (my_conf / "model" / "resnet18.yaml").write_text("_target_: mine.net\n")
    (my_conf.parent / "other" / "model").mkdir(parents=True)
    (my_conf.parent / "other" / "model" / "odd.yaml").write_text("a: [\n")
    (my_conf.parent / "dates" / "model").mkdir(parents=True)
    (my_conf.parent / "dates" / "model" / "date.yaml").write_text("a: 2024-13-45\n")
    for words, message in {
        ("--config-dir", "nope"): r"ConfigError: --config-dir nope is not a folder; .*",
        ("--config-dir=my conf",): r"ConfigError: .*embedx has model/resnet18.yaml too; rename .*",
        (
            "--config-dir",
            "other",
        ): r"ConfigError: other/model/odd.yaml is not YAML: while parsing .*",
        ("--config-dir", "dates"): r"ConfigError: dates/model/date.yaml is not YAML: month must .*",
        ("--config-dir",): r"ConfigError: --config-dir takes one folder, once: .*",
        ("--config-dir=",): r"ConfigError: --config-dir takes one folder, once: .*",
        ("-cd", "other", "--config-dir", "my conf"): r"ConfigError: --config-dir takes one .*",
        ("--config-name", "x"): r"ConfigError: --config-name would .*: --config-dir FOLDER",
    }.items():
        status, _, err = embedx_here("extract", "model=odd", *words)
        assert status == 1
        assert len(err) == 1
        assert re.fullmatch(message, err[0]), err


def pressed_tab(line: str, cwd: Path) -> list[str]:
    """What bash offers at the end of a line, by the function that ``-sc install=bash`` gives."""
    script = """
        eval "$(embedx -sc install=bash)"
        COMP_LINE=$1
        COMP_WORDS=($1)
        [ "${1% }" = "$1" ] || COMP_WORDS+=("")
        COMP_POINT=${#1}
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        hydra_bash_completion
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", line],
        cwd=cwd,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    {
        "embedx ex": {"extract", "export", "explain"},
        "embedx extract model=res": {"model=resnet18", "model=resnet50"},
        "embedx extract +model=resnet1": {"+model=resnet18"},
        "embedx extract batch": {"batch_size="},
        "embedx extract model=mobilenet_v3_small model.inp": {"model.input_size="},
        "embedx project projection=t": {"projection=tsne"},
        "embedx project projection=tsne projection.per": {"projection.perplexity="},
        "embedx extract --config-dir mine model=my": {"model=mynet"},
        "embedx extract data=folder data.root=./ph": {"data.root=./photos"},
        "embedx nostage mo": set(),
        "embedx extract data=folder data.root=./evil/": {"data.root=./evil/fine"},
        "embedx extract --config-dir evil model=own": {"model=own", "model=own2"},
    }.items(),
)
def test_tab_completes_in_bash(line: str, offered: set[str], tmp_path: Path, photos: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mynet.yaml").write_text("_target_: torch.nn.Identity\n")
    for name in ("evil/$(touch PWNED)", "evil/`touch PWNED`", "evil/fine", "evil/model"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("own2", "own$(touch PWNED)", "own`touch PWNED`"):
        (tmp_path / "evil" / "model" / f"{name}.yaml").write_text("_target_: x.y\n")
    assert set(pressed_tab(line, tmp_path)) - {"data.root=./evil/model"} == offered
    assert not (tmp_path / "PWNED").exists()


# --------------------------------------------------------------------------- made again


def again(path: Path, embedx_here: Here) -> list[str]:
    status, out, err = embedx_here("info", override("path", path).strip("'"))
    assert (status, err) == (0, [])
    (line,) = [line for line in out if line.startswith("again ")]
    assert line.split("again", 1)[1].strip().startswith("python -m embedx ")
    return shlex.split(line.split("python -m embedx ")[1])


@pytest.mark.parametrize(
    "words",
    [
        (*TINY, "batch_size=5", "layers=[features.3,classifier.2]", "pooling=[gap,none]"),
        (*TINY, "dtype=float16", "save_outputs=true", "thumbnails=0", 'name="a, b=c\'d"'),
        ("--config-dir", "my conf", "model=net", "data=rows", "data.n=7", "out=de/ep"),
        (*TINY, "layers=features", "normalize=true", "pooling={_target_:embedx.pooling.gem,p:4}"),
        (*TINY, "layers=[features,features.1]", "pooling=[{_target_:mine.corner},max]"),
        (*TINY[:3], "data=folder", "data.root=photos", "data.labels=none", "model.resize=70"),
    ],
)
def test_the_command_that_info_prints_makes_the_same_file(
    words: tuple[str, ...], my_conf: Path, photos: Path, embedx_here: Here, tmp_path: Path
) -> None:
    status, out, err = embedx_here("extract", *words)
    assert (status, err) == (0, [])
    path = next(tmp_path.glob("*/*/embeddings.h5"))
    before = path.read_bytes()
    command = again(path.relative_to(tmp_path), embedx_here)
    status, out, err = embedx_here(*command)
    assert (status, err) == (0, [])
    assert any(line.endswith("nothing to do") for line in out)
    elsewhere = [*command[:-1], "out=else/where"]
    status, out, err = embedx_here(*elsewhere)
    assert (status, err) == (0, [])
    assert (
        (tmp_path / "else" / "where" / "embeddings.h5").read_bytes() == before == path.read_bytes()
    )
    # Handed on without config.yaml, the command has of a path its last part alone.
    path.with_name("config.yaml").unlink()
    assert again(path, embedx_here)[:-1] == command[:-1]


def test_the_command_of_a_projection_finds_it_done_and_makes_it_again(
    my_conf: Path, embedx_here: Here, tmp_path: Path
) -> None:
    assert embedx_here("extract", *TINY, "name=run")[0] == 0
    for words in (
        ("projection=tsne", "projection.perplexity=50"),  # clamped: what was asked for counts
        ("projection=pca", "projection.n_components=3"),
    ):
        assert embedx_here("project", *words)[0] == 0
    for path in sorted((tmp_path / "outputs" / "run" / "projections").iterdir()):
        before = path.read_bytes()
        command = again(path.relative_to(tmp_path), embedx_here)
        status, out, err = embedx_here(*command)
        assert (status, err) == (0, [])
        assert any(line.endswith("nothing to do") for line in out)
        path.unlink()
        assert embedx_here(*command)[0] == 0
        assert path.read_bytes() == before
    assert len(list((tmp_path / "outputs" / "run" / "projections").iterdir())) == 2


def test_the_command_of_a_map_made_beside_others_names_them(
    embedx_here: Here, tmp_path: Path
) -> None:
    assert embedx_here("extract", *TINY, "name=old")[0] == 0
    assert embedx_here("extract", *TINY, "data.limit=30", "name=new")[0] == 0
    folder = tmp_path / "outputs" / "old" / "projections"
    old = "embeddings=outputs/old"
    assert embedx_here("project", "projection=pca", old)[0] == 0
    (first,) = folder.iterdir()
    name = f"outputs/old/projections/{first.name}"
    for words, key in (
        (("projection=tsne", "pre_pca=3", old), "pre_pca=3"),
        (("projection=pca", "landmarks=9", old), "landmarks=9"),
        (("projection=tsne", "projection.perplexity=[2,3]", old), "projection.perplexity=[2,3]"),
        (("projection=tsne", f"align_to={first.stem}", old), f"align_to={name}"),
        ((f"transform_from={name}", "embeddings=outputs/new"), f"transform_from={name}"),
    ):
        before = set(tmp_path.glob("outputs/*/projections/*.h5"))
        status, out, err = embedx_here("project", *words)
        assert (status, err) == (0, []), out
        (path,) = set(tmp_path.glob("outputs/*/projections/*.h5")) - before
        bytes_before = path.read_bytes()
        command = again(path.relative_to(tmp_path), embedx_here)
        assert key in command
        status, out, err = embedx_here(*command)
        assert (status, err) == (0, [])
        assert any(line.endswith("nothing to do") for line in out)
        path.unlink()
        assert embedx_here(*command)[0] == 0
        assert path.read_bytes() == bytes_before
    status, out, err = embedx_here("project", f"transform_from={name}", "projection=umap")
    assert (status, len(err)) == (1, 1)
    assert err[0].startswith("ConfigError: projection=umap has no use beside transform_from: ")
    first.unlink()
    (placed,) = tmp_path.glob("outputs/new/projections/*.h5")
    line = the_line_again(placed.relative_to(tmp_path), embedx_here)
    assert line.startswith("made with transform_from=a map that is not beside it, id ")


def test_info_says_what_was_made_from_python(embedx_here: Here, tmp_path: Path) -> None:
    import torch

    import embedx

    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    run = embedx.extract(net, torch.ones(5, 3), layers="0", out=tmp_path / "run")

    def first(x: object) -> object:
        from embedx.methods import Result

        return Result(x[:, :2])  # type: ignore[index]

    embedx.project(run, method=first)
    status, out, _ = embedx_here("info", "path=run")
    assert status == 0
    assert re.search(r"^again +made from Python, by embedx.extract$", "\n".join(out), re.M)
    (path,) = (tmp_path / "run" / "projections").iterdir()
    status, out, _ = embedx_here("info", f"path={path}")
    assert status == 0
    assert re.search(
        r"^again +made from Python, by embedx.project with .*first", "\n".join(out), re.M
    )


def rewritten(path: Path, **attrs: object) -> None:
    """The file with these attributes in place of its own, None for no such attribute."""
    with h5py.File(path, "r+") as file:
        for key, value in attrs.items():
            file.attrs.pop(key, None)
            if value is not None:
                file.attrs[key] = value


def the_line_again(path: Path, embedx_here: Here) -> str:
    status, out, err = embedx_here("info", f"path={path}")
    assert (status, err) == (0, [])
    (line,) = [line for line in out if line.startswith("again")]
    return line.removeprefix("again").strip()


UNUSABLE = [
    None,
    7,
    "",
    "5",
    "- a\n",
    "a: [",
    "!!bool x",
    "!!timestamp x",
    "choices: 5",
    "choices: {}",
    "choices: {model: net}\nmodel: {}",
    "choices: {model: net, data: rows}",
    "choices: {model: net, data: rows}\nmodel: 3\ndata: {}",
    "choices: {model: [net], data: rows}\nmodel: {}\ndata: {}",
    "choices: {model: net, data: rows, --config-path: evil}\nmodel: {}\ndata: {}",
    "choices: {model: net, data: rows, hydra: x}\nmodel: {}\ndata: {}\nhydra: {}",
    "choices: {model: net, data: rows, --config-dir: [1]}\nmodel: {}\ndata: {}",
    "choices: {model: net, data: rows}\nmodel: {'a;b': 1}\ndata: {}",
    "choices: {model: net, data: rows}\nmodel: {1: 1}\ndata: {}",
    "a: &a [x, x]\nb: &b [*a, *a]\nchoices: *b",
    "[" * 5000,
]


@pytest.mark.parametrize("config", UNUSABLE)
def test_info_says_where_a_file_does_not_say_how_it_was_made(
    config: object, embedx_here: Here, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path, np.ones((3, 2)))
    rewritten(path, config=config)
    assert the_line_again(path, embedx_here) == "the file does not say how it was made"


@pytest.mark.parametrize(
    "settings",
    [
        *(None, 7, "", "5", "[]", "{}", "{", "[" * 5000),
        '{"method": "pca"}',
        '{"method": 5, "layer": "avgpool"}',
        '{"method": "pca", "layer": ["avgpool"]}',
        '{"method": "pca", "layer": "avgpool", "function": {}}',
        '{"method": "pca", "layer": "avgpool", "a b": 1}',
        '{"method": "pca", "layer": "avgpool", "n_components": ' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_info_says_where_a_map_does_not_say_how_it_was_made(
    settings: object, embedx_here: Here, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path, np.ones((3, 2)))
    done = projection_file(path, "pca-1", np.ones((3, 2)))
    rewritten(done, settings=settings)
    assert the_line_again(done, embedx_here) == "the file does not say how it was made"


HOSTILE = [
    "; rm -rf ~",
    "$(touch owned)",
    "`touch owned`",
    "a' ; touch owned ; '",
    '"; touch owned; "',
    "--config-dir=/tmp",
    "*",
    "~",
    "a b",
    "\\",
    "'",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_the_command_out_of_a_hostile_file_is_safe_in_a_shell(
    value: str, embedx_here: Here, tmp_path: Path
) -> None:
    """The shell parts it into the words meant, whatever they hold, and runs nothing else."""
    path = embeddings_file(tmp_path, np.ones((3, 2)))
    config = {
        "choices": {"model": value, "data": "digits", "--config-dir": value},
        "model": {"_target_": value, "deep": {value: [value]}},
        "data": {"limit": value},
        "layers": [value],
    }
    rewritten(
        path, config=yaml.safe_dump(config, sort_keys=False), again="python -m embedx ; touch owned"
    )
    line = the_line_again(path, embedx_here)
    script = f"python() {{ printf '%s\\0' \"$@\"; }}; {line}"
    shell = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, timeout=60)
    assert shell.stderr == b""
    words = shell.stdout.decode().split("\0")
    assert words[:6] == ["-m", "embedx", "extract", "--config-dir", value, words[5]]
    keys = [word.partition("=")[0].lstrip("+") for word in words[5:-1]]
    assert keys == ["model", "model._target_", "model.deep", "data", "data.limit", "layers", "out"]
    assert shlex.split(line.removeprefix("python ")) == words[:-1]
    assert not (tmp_path / "owned").exists()
    done = projection_file(path, "pca-1", np.ones((3, 2)))
    rewritten(done, settings=json.dumps({"method": "pca", "layer": value, "n_components": [value]}))
    words = shlex.split(the_line_again(done, embedx_here))
    keys = [word.partition("=")[0].lstrip("+") for word in words[4:]]
    assert keys == ["projection", "projection.n_components", "layer", "embeddings"]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "\u202e", "a\u2028b"])
def test_what_a_terminal_would_not_show_is_no_command(
    value: str, embedx_here: Here, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path, np.ones((3, 2)))
    config = {
        "choices": {"model": "own", "data": "digits"},
        "model": {"name": value},
        "data": {"limit": 3},
    }
    rewritten(path, config=yaml.safe_dump(config, sort_keys=False))
    assert the_line_again(path, embedx_here).startswith("made with settings that no terminal shows")


def test_a_map_whose_embeddings_are_damaged_is_still_described(
    embedx_here: Here, tmp_path: Path
) -> None:
    path = embeddings_file(tmp_path, np.ones((3, 2)))
    done = projection_file(path, "pca-1", np.ones((3, 2)))
    rewritten(done, settings='{"method": "pca", "layer": "avgpool"}')
    assert the_line_again(done, embedx_here).startswith("python -m embedx project projection=pca")
    path.write_bytes(path.read_bytes()[:5000])
    assert the_line_again(done, embedx_here) == "made of embeddings that are not beside it, id one"
    path.unlink()
    assert the_line_again(done, embedx_here) == "made of embeddings that are not beside it, id one"


@pytest.mark.parametrize("key", ["method", "layer", "out", "overwrite", "embeddings", "function"])
def test_a_key_of_a_plugin_by_the_name_of_one_of_its_stage_is_one_line(
    key: str, my_conf: Path, embedx_here: Here, tmp_path: Path
) -> None:
    module = f"has_{key}"  # another name each time: Python keeps what it imported
    (tmp_path / f"{module}.py").write_text(
        f"def open_ended(x, **options): raise AssertionError\n"
        f"def named(x, *, {key}=1): raise AssertionError\n"
        f"def write(run, maps, folder, **options): raise AssertionError\n"
    )
    (my_conf / "exporter").mkdir()
    (my_conf / "exporter" / "mine.yaml").write_text(f"_target_: {module}.write\n{key}: 3\n")
    for name in ("open_ended", "named"):
        path = my_conf / "projection" / f"{name}.yaml"
        path.write_text(f"_target_: {module}.{name}\n{key}: 3\n")
    path = embeddings_file(tmp_path, np.ones((9, 2)))
    lines = {name: ("project", f"projection={name}") for name in ("open_ended", "named")}
    if key in ("out", "embeddings"):
        lines["write"] = ("export", "exporter=mine")
    for name, words in lines.items():
        status, _, err = embedx_here(*words, "--config-dir", "my conf", f"embeddings={path}")
        assert status == 1
        group = words[1].partition("=")[0]
        assert len(err) == 1
        assert re.fullmatch(
            rf"ConfigError: {group}\.{key} cannot be passed on: {words[0]} has '{key}' for itself; "
            rf"give that parameter of {module}\.{name} another name",
            err[0],
        )


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "k=null"),
        (True, "k=true"),
        (3, "k=3"),
        (0.5, "k=0.5"),
        ("resnet18", "k=resnet18"),
        ("null", "'k=\"null\"'"),
        ("12", "'k=\"12\"'"),
        ("outputs/a-b/c.h5", "k=outputs/a-b/c.h5"),
        ("a, b", "'k=\"a, b\"'"),
        (["a", 1, None], "'k=[a,1,null]'"),
        ("w/${oc.env:HOME}", "'k=\"w/\\${oc.env:HOME}\"'"),
        ("x${", "'k=\"x\\${\"'"),
        ({"a": [1]}, "'k={a:[1]}'"),
    ],
)
def test_a_value_is_written_as_hydra_reads_it_back(value: object, word: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    assert override("k", value) == word
    (typed,) = shlex.split(word)
    config = OmegaConf.create({"k": OverridesParser.create().parse_override(typed).value()})
    assert OmegaConf.to_container(config, resolve=True) == {"k": value}


def test_a_config_file_that_holds_no_keys_is_said(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        Configs(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no model/none.yaml in"):
        Configs().document("model/none")


def test_a_sweep_without_a_job_and_a_long_note_are_said(embedx_here: Here, tmp_path: Path) -> None:
    import torch

    assert embedx_here("extract", *TINY, "name=run")[0] == 0
    glob = "embeddings=glob(outputs/none*)"
    status, _, err = embedx_here("project", "-m", "projection=pca", glob)
    assert status == 1
    assert err[-1].startswith("ConfigError: the sweep has no job")
    torch.save({f"layer{i}.weight": torch.zeros(2) for i in range(40)}, tmp_path / "other.pt")
    status, _, err = embedx_here("extract", *TINY, "model.checkpoint=other.pt")
    assert status == 1
    assert err[-1].startswith("ModelError: checkpoint other.pt does not fit")
    assert re.fullmatch(r"\.\.\. and \d+ more", err[-2])
    assert len(err) == said.NOTE_LINES + 2


def test_text_from_a_file_cannot_turn_the_line_around(capsys: pytest.CaptureFixture[str]) -> None:
    said.Lines().emit(logging.LogRecord("embedx", 20, "", 0, "a\u202ecba\u2066x\u200f", (), None))
    assert capsys.readouterr().out == "a?cba?x?\n"


def test_a_command_that_runs_code_named_in_a_file_is_marked(
    my_conf: Path, embedx_here: Here, tmp_path: Path
) -> None:
    words = ("model=own", "model._target_=mine.net", "+model.depth=1", "data=rows")
    assert embedx_here("extract", "--config-dir", "my conf", *words, "name=code")[0] == 0
    status, out, err = embedx_here("info", "path=outputs/code")
    assert (status, err) == (0, [])
    (line,) = [line for line in out if line.startswith("runs code")]
    assert (
        line.split("  ")[-1].strip()
        == "mine.net, mine.rows, as the command above does; read it first"
    )
    assert embedx_here("extract", *TINY, "name=plain")[0] == 0
    assert not any("runs code" in line for line in embedx_here("info", "path=outputs/plain")[1])


def test_settings_of_another_run_that_lie_beside_a_file_are_not_taken_for_its_own(
    embedx_here: Here, tmp_path: Path, photos: Path
) -> None:
    import shutil

    for parent in ("w1", "w2"):
        shutil.copytree(photos, tmp_path / parent / "photos", copy_function=shutil.copy)
        words = ("data=folder", f"data.root={parent}/photos", f"name={parent}")
        assert embedx_here("extract", *TINY[:3], *words)[0] == 0
    outputs = tmp_path / "outputs"
    shutil.copy(outputs / "w1" / "config.yaml", outputs / "w2" / "config.yaml")
    assert "data.root=w1/photos" in again(Path("outputs/w1"), embedx_here)
    assert "data.root=photos" in again(Path("outputs/w2"), embedx_here)


def test_what_only_begins_like_a_path_stands_whole_in_the_settings_of_a_file(
    tmp_path: Path,
) -> None:
    public = yaml.safe_load(
        public_config(
            {
                "model": {"own": str(tmp_path), "gone": "/no/such/place.pt"},
                "data": {"root": "/no/such/photos", "labels": "/([a-z]+)_"},
            }
        )
    )
    assert public["data"] == {"root": "photos", "labels": "/([a-z]+)_"}
    assert public["model"] == {"own": tmp_path.name, "gone": "place.pt"}
