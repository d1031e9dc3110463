"""A stage and its composed config become one call of the stage's function.

The config is checked against the signatures of the functions that it calls. Only this module
imports stages.
"""

import contextlib
import inspect
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embedx import jobs
from embedx.checks import check_argument, check_arguments, unknown_key
from embedx.configs import ROW_SETTINGS, Configs, override, quoted, settings_sha256
from embedx.errors import ConfigError, DataError, nearest
from embedx.info import UNSAID, foreign_code, info, recorded
from embedx.said import one_line, quiet

if TYPE_CHECKING:
    from embedx.derived import Projection
    from embedx.explain import Explanation
    from embedx.parts import Engine, Feed
    from embedx.store import Embeddings

log = logging.getLogger("embedx")


def call_stage(stage: str, config: Any) -> None:
    """Call the function of a stage with what was composed for it.

    Raises:
        EmbedxError: A key or a value is not one that it takes, or as the stage.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise one_line(error, stage, (), jobs.configs()) from None
    assert isinstance(composed, dict)
    values: dict[str, Any] = {str(key): value for key, value in composed.items()}
    values.pop("experiment", None)
    known = {*jobs.configs().keys(stage), *jobs.configs().defaults(stage)}
    if strange := [str(key) for key in values if key not in known]:
        raise unknown_key(strange[0], sorted(known))
    for key in ("embeddings", "out", "path"):
        if isinstance(values.get(key), str):
            values[key] = os.path.expanduser(values[key])
    _CALLS[stage](values)


def _stage_extract(values: dict[str, Any]) -> None:
    path = _extract(values)
    if values["part"] is None:
        jobs.say_next(f"project projection=umap {override('embeddings', path)}")
    else:  # when all are made: what makes one file of them
        typed = [word for word in jobs.typed() if not re.match(r"\+*part=", word)]
        jobs.say_next(shlex.join(["extract", *jobs.config_dir_words(), *typed]))


def _extract(values: dict[str, Any], *, feed: "Feed | None" = None) -> Path:
    from embedx.extract import extract

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    out, name = settings.pop("out"), settings.pop("name")
    settings.pop("engine")
    settings["pooling"] = jobs.pooling_of(settings["pooling"])
    check_arguments(extract, settings, positional=2)  # before the model is built
    for key, value in (("name", name), ("out", out)):
        check_argument(key, value, str | None)
        if value is not None and not value.strip():
            raise ConfigError(f"{key} is empty; give a name, or leave it out")
    build_model, build_data = jobs.call_of(model, "model"), jobs.call_of(data, "data")
    folder = Path(out) if out else Path("outputs") / _folder_name(name or _run_name(values))
    if name and folder.name != name:
        log.info("the name %s is written %s", name, folder.name)
    source = build_data()  # the quicker to fail comes first
    choices = {group: jobs.choice(group) for group in ("model", "data")}
    config = {**values, "choices": {**choices, **jobs.config_dir()}}
    for key in ("engine", "n_parts", "part"):  # how the work is shared out says nothing of the file
        config.pop(key, None)
    engine = feed or _engine("extract", values, folder)
    return extract(build_model(), source, out=folder, config=config, engine=engine, **settings).path


def _engine(stage: str, values: dict[str, Any], folder: Path) -> "Engine | None":
    """What has parts made, by processes that call the stage with the same values; None for none."""
    from embedx.parts import Engine, Task

    engine = jobs.call_of(values["engine"], "engine")()
    if not isinstance(engine, Engine):
        return None
    settings = {
        "stage": stage,
        "hydra": _plain_hydra(),
        "values": values,
        "folder": str(folder.resolve()),
    }
    engine.task = Task("embedx.stages:make_parts", settings, str(values["device"]))
    return engine


def _plain_hydra() -> dict[str, Any]:
    """What a worker has to know of how its config was composed."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    hydra: Any = HydraConfig.get()
    kept = {"runtime": ["choices", "config_sources"], "overrides": ["task"]}
    return {
        key: {name: OmegaConf.to_container(hydra[key][name]) for name in names}
        for key, names in kept.items()
    }


def make_parts(settings: dict[str, Any], feed: "Feed") -> None:
    """Make parts of an extraction or an explanation, in a worker of an engine.

    Args:
        settings: What the driver gave to its task.
        feed: Which parts.

    Raises:
        EmbedxError: As the stage.
    """
    from hydra.conf import HydraConf
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    from embedx import progress

    quiet()
    progress.shows_bars = False
    hydra = OmegaConf.merge(OmegaConf.structured(HydraConf), settings["hydra"])
    HydraConfig.instance().set_config(OmegaConf.create({"hydra": hydra}))
    values = {**settings["values"], "overwrite": False}
    if settings["stage"] == "explain":
        _explain(values, run=Path(settings["folder"]), feed=feed)
    else:
        values |= {"n_parts": feed.about["n_parts"], "part": None, "out": settings["folder"]}
        _extract(values, feed=feed)


def _run_name(values: Mapping[str, Any]) -> str:
    """``<model>-<data>``, and a hash where any setting that decides the rows is not the default."""
    import hydra
    from omegaconf import OmegaConf

    model, data = jobs.choice("model"), jobs.choice("data")
    called = values["model"].get("name") or model
    if Path(called).expanduser().is_dir():  # a folder is called by its last part
        called = Path(called).expanduser().resolve().name
    name = f"{called}-{data}"
    rows = {key: values[key] for key in ROW_SETTINGS}
    default = OmegaConf.to_container(hydra.compose("extract", [f"model={model}", f"data={data}"]))
    assert isinstance(default, dict)
    usual = {key: default[key] for key in ROW_SETTINGS}
    is_usual_size = values["batch_size"] == default["batch_size"]
    if not is_usual_size and foreign_code([values["model"], values["pooling"]]):
        rows["batch_size"] = values["batch_size"]  # such code may see a batch as a whole
    own = values["data"]
    key = next((key for key in ("path", "root") if isinstance(own.get(key), str)), None)
    if key is not None and own[key]:
        # The plain name belongs to what has that name right here; any other one is another.
        full = Path(own[key]).expanduser().resolve()
        name = f"{called}-{own.get('name') or full.name or 'root'}"
        rows["data"] = {**rows["data"], key: str(full)}
        usual["data"] = {**usual["data"], key: str(Path.cwd().resolve() / full.name)}
    if rows == usual:
        return name
    return f"{name}-{settings_sha256(rows)[:6]}"


def _folder_name(name: str) -> str:
    """A name as one folder: what file systems or TensorBoard refuse is written ``_xNN_``."""

    def escaped(match: re.Match[str]) -> str:
        return f"_x{ord(match[0]):02x}_"

    return re.sub(r"[^\w.-]|^\.", escaped, name)


def _stage_project(values: dict[str, Any]) -> None:
    _project(values)
    jobs.say_next(f"view {override('embeddings', values['embeddings'])}")


def _project(values: dict[str, Any]) -> "Projection":
    from embedx.project import project

    settings = dict(values)
    node = settings.pop("projection")
    settings["engine"] = jobs.call_of(settings["engine"], "engine")()
    if settings["transform_from"] is not None:
        named = [word for word in jobs.typed() if re.match(r"\+*projection\b", word)]
        if named:
            raise ConfigError(
                f"{named[0]} has no use beside transform_from: the rows are placed by the method "
                "and the parameters of that map; leave it out"
            )
        return project(**settings)
    method, parameters = jobs.plugin_of(node, "projection", project)
    return project(method=method, **settings, **parameters)


def _stage_evaluate(values: dict[str, Any]) -> None:
    from embedx.evaluate import evaluate

    evaluate(**values)
    jobs.say_next(f"view {override('embeddings', values['embeddings'])}")


def _stage_export(values: dict[str, Any]) -> None:
    from embedx.export import export, tensorboard

    named = [override(key, values[key]) for key in ("embeddings", "out") if values[key]]
    exporter, options = jobs.plugin_of(values.pop("exporter"), "exporter", export)
    export(exporter=exporter, **values, **options)
    if exporter is tensorboard:
        jobs.say_next(" ".join(["view viewer=tensorboard", *named]))


def _stage_view(values: dict[str, Any]) -> None:
    from embedx.view import view

    view(**values)
    named = override("embeddings", values["embeddings"])
    if values["viewer"] == "map" and not values["follow"]:
        jobs.say_next(f"view viewer=report {named}")
    elif values["viewer"] == "report":
        jobs.say_next(f"export {named}")


def _stage_explain(values: dict[str, Any]) -> None:
    found = _explain(values)
    if found.maps is not None:
        jobs.say_next(f"info {override('path', found.maps.path)}")
    else:
        kept = r"\+*(model|data|name|ids|rows|limit|device)\b"
        typed = [word for word in jobs.typed() if re.match(kept, word)]
        jobs.say_next(shlex.join(["explain", *jobs.config_dir_words(), *typed, "method=gradcam"]))


def _explain(
    values: dict[str, Any], *, run: Path | None = None, feed: "Feed | None" = None
) -> "Explanation":
    import hydra
    from omegaconf import OmegaConf

    from embedx.explain import explain

    settings = dict(values)
    model, data = settings.pop("model"), settings.pop("data")
    name = settings.pop("name")
    settings.pop("engine")
    check_arguments(explain, settings, positional=2)  # before the model is built
    check_argument("name", name, str | None)
    if name is not None and not name.strip():
        raise ConfigError("name is empty; give a name, or leave it out")
    build_model, build_data = jobs.call_of(model, "model"), jobs.call_of(data, "data")
    choices = {group: jobs.choice(group) for group in ("model", "data")}
    if run is None:
        if name is None:  # that of an extraction with nothing but this model and these data
            words = [f"{group}={option}" for group, option in choices.items()]
            usual = OmegaConf.to_container(hydra.compose("extract", words))
            assert isinstance(usual, dict)
            of_run = {key: values[key] for key in choices}
            name = _run_name({**{str(key): value for key, value in usual.items()}, **of_run})
        run = Path("outputs") / _folder_name(name)
    source = build_data()  # the quicker to fail comes first
    config = {**values, "choices": {**choices, **jobs.config_dir()}}
    config.pop("engine")
    engine = feed or _engine("explain", values, run)
    return explain(build_model(), source, run=run, config=config, engine=engine, **settings)


def _stage_neighbors(values: dict[str, Any]) -> None:
    from embedx import ready_made
    from embedx.search import is_hdf5, row_of, search

    check_arguments(search, values)
    opened = ready_made.opened(values.pop("embeddings"))
    query = values.pop("query")
    with contextlib.ExitStack() as stack:
        asked = query
        if isinstance(query, str) and row_of(opened, query) is None:
            path = Path(query).expanduser()
            if path.is_file() and not is_hdf5(path):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="embedx-"))
                asked = _embedded(path, opened, layer=values["layer"], folder=Path(folder))
        findings = search(opened, query=asked, **values)
    suspects = [row for table in findings.tables.values() for row in table if row.get("suspect")]
    named = f" {override('query', suspects[0]['id'])}" if query is None and suspects else ""
    if named or query is not None:
        jobs.say_next(f"neighbors {override('embeddings', opened.path)}{named}")


def _stage_compare(values: dict[str, Any]) -> None:
    from embedx.compare import compare

    compare(values.pop("runs"), **values)


def _embedded(path: Path, opened: "Embeddings", *, layer: str | None, folder: Path) -> "Embeddings":
    """A picture through the model that made a file, as the file says it was made.

    A file may say anything: only models and poolings of embedx are built because it says so.

    Raises:
        ConfigError: The file does not say how it was made, or by code that is not embedx's.
        DataError: The picture cannot be read.
        StoreError: The file has no such layer.
    """
    from embedx.extract import extract
    from embedx.pictures import decode_image
    from embedx.pooling import POOLINGS
    from embedx.sources import Source

    point, _ = opened.rows(layer)
    settings = recorded(opened.path, opened.attrs)
    where = f"query={path} is not run through the model of {opened.path}, for"
    way_out = "extract it by your own command with another name, then query=outputs/NAME"
    if settings is None or "choices" not in settings:
        raise ConfigError(f"{where} {UNSAID}; {way_out}")
    model, pool = settings.get("model"), settings.get("pooling", "auto")
    if isinstance(pool, list):
        points = list(opened.embeddings)
        pool = pool[points.index(point)] if len(pool) == len(points) else None
    ours = Configs()
    targets = {ours.document(f"model/{name}")["_target_"] for name in ours.options("model")}
    poolings = {f"embedx.pooling.{name}" for name in POOLINGS}
    named = model.get("_target_") if isinstance(model, dict) else None
    if foreign := foreign_code([model, pool]):
        raise ConfigError(
            f"{where} that takes code that a file names ({', '.join(foreign)}), which is not run; "
            + way_out
        )
    is_known_pool = isinstance(pool, str) or (
        isinstance(pool, dict) and pool.get("_target_") in poolings
    )
    if named not in targets - {"???"} or not is_known_pool:
        raise ConfigError(f"{where} its settings name no model of embedx; {way_out}")
    try:
        image = decode_image(path)
    except (DataError, OSError) as error:
        raise DataError(f"query={path} cannot be read as a picture: {error}") from None
    kept = {key: settings[key] for key in ("normalize", "precision", "dtype") if key in settings}
    log.info("running %s through %s", path, opened.attrs.get("model"))
    before = log.level
    log.setLevel(logging.WARNING)  # where it is put for a moment is no news
    try:
        return extract(
            jobs.call_of(model, "model")(),
            Source(name=path.name, ids=[str(path)], read=lambda _: image, fingerprint=str(path)),
            layers=[point],
            pooling=jobs.pooling_of(pool),
            thumbnails=0 if opened.thumbnails is None else opened.thumbnails.shape[1],
            out=folder,
            num_workers=0,
            **kept,
        )
    finally:
        log.setLevel(before)


def run(
    extraction: Mapping[str, Any],
    *,
    projections: list[str],
    n_components: Literal[2, 3],
    random_state: int,
    color: str,
) -> None:
    """Extract, project by each method, evaluate, view and export in turn.

    Args:
        extraction: The values of ``extract``.
        projections: Methods, each an option of ``projection``.
        n_components: Dimensions of the maps.
        random_state: Seed of the maps.
        color: Column to colour the maps by.

    Raises:
        EmbedxError: As the stages; wrong values of its own before the work begins.
    """
    import hydra
    from omegaconf import OmegaConf

    from embedx.evaluate import evaluate
    from embedx.view import view

    known = jobs.configs().options("projection")
    if not projections:
        raise ConfigError(f"projections is empty; choose from {', '.join(known)}")
    for option in projections:
        if option not in known:
            raise ConfigError(
                f"there is no projection {option!r}; the nearest are "
                f"{', '.join(nearest(option, known))}"
            )
    if not 0 <= random_state < 2**32:
        raise ConfigError(f"random_state must be 0 to 2**32 - 1, not {random_state}")
    path = _extract({**extraction, "part": None})

    def compose(stage: str, *overrides: str) -> dict[str, Any]:
        word = f"embeddings={quoted(str(path))}"
        composed = OmegaConf.to_container(hydra.compose(stage, [*overrides, word]), resolve=True)
        assert isinstance(composed, dict)
        return {str(key): value for key, value in composed.items()}

    names = []
    for method in projections:
        settings = compose("project", f"projection={method}")
        settings["projection"].update(n_components=n_components, random_state=random_state)
        names.append(_project({**settings, "overwrite": extraction["overwrite"]}).name)
    evaluate(path)
    view(path, color=color)
    _stage_export(compose("export"))
    jobs.say_next(f"view viewer=report {override('embeddings', path)}")
    jobs.say_next(f"info {override('path', path)} verify=true")
    picture = "maps.png" if len(set(names)) > 1 else f"map-{names[0]}.png"
    log.info("to look at: %s", path.parent / picture)


def _stage_run(values: dict[str, Any]) -> None:
    own = {key: values.pop(key) for key in list(inspect.signature(run).parameters)[1:]}
    check_arguments(run, own, positional=1)
    run(values, **own)


def _stage_layers(values: dict[str, Any]) -> None:
    from embedx.layers import layers
    from embedx.models import without_values

    node = values.pop("model")
    check_arguments(layers, values, positional=1)
    build = jobs.call_of(node, "model")
    # Names and shapes need no weights of ours; a key of the user's own may mean anything.
    is_ours = jobs.is_ours(jobs.located(node["_target_"], "model"))
    is_empty = is_ours and "weights" in node and node.get("checkpoint") is None
    if is_empty:
        build = jobs.call_of({**node, "weights": None}, "model")
    data = values["format"] if values["out"] is None and values["format"] != "tree" else None
    # A pipe takes the data alone.
    with contextlib.nullcontext() if data is None else contextlib.redirect_stdout(sys.stderr):
        with without_values() if is_empty else contextlib.nullcontext():
            model = build()
        table = layers(model, **values)
    if data is not None:
        sys.stdout.buffer.write(table.as_bytes(data))
        sys.stdout.flush()
        return
    if values["out"] is None:
        for line in table.lines():
            log.info("%s", line)
    typed = [word for word in jobs.typed() if word.lstrip("+").startswith("model")]
    layer = model.layer or "penultimate"
    jobs.say_next(shlex.join(["extract", *jobs.config_dir_words(), *typed, f"layers=[{layer}]"]))


def _stage_info(values: dict[str, Any]) -> None:
    check_arguments(info, values)
    info(**values)


_CALLS: dict[str, Callable[[dict[str, Any]], None]] = {
    "run": _stage_run,
    "extract": _stage_extract,
    "project": _stage_project,
    "evaluate": _stage_evaluate,
    "export": _stage_export,
    "view": _stage_view,
    "explain": _stage_explain,
    "neighbors": _stage_neighbors,
    "compare": _stage_compare,
    "layers": _stage_layers,
    "info": _stage_info,
}
