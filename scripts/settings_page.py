"""Write docs/reference/settings.md from the settings dataclasses (documentation build).

Run `python scripts/settings_page.py` after a change of a setting.

Names, types, defaults and meanings are those of the code; the groups and the examples stand here. A test compares
the page with what this makes, and tries the examples.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tritium.gang.settings
from tritium.gang.settings import Gang
from tritium.ml import EarlyStopping, FunctionSettings, KerasSettings, LightningSettings, TorchSettings
from tritium.ml.lightgbm.settings import LightGBMClassifierSettings, LightGBMRankerSettings, LightGBMSettings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
ESTIMATORS: dict[str, type] = {
    "Torch": TorchSettings,
    "Keras": KerasSettings,
    "Lightning": LightningSettings,
    "LightGBM": LightGBMSettings,
    "Function": FunctionSettings,
}
SOURCES: dict[str, type] = {
    **ESTIMATORS,
    "LightGBMClassifier": LightGBMClassifierSettings,
    "LightGBMRanker": LightGBMRankerSettings,
    "Gang": Gang,
}
KINDS = (LightGBMClassifierSettings, LightGBMRankerSettings)
HEAD = """# Settings

<!-- Written by scripts/settings_page.py: change the settings' own text, or the groups and examples there. -->

Every setting of the estimators, and of a gang. A setting is a keyword of the estimator, and a Spark ML `Param` of the
same name: `TorchEstimator(epochs=5)`, `estimator.epochs` in a `ParamGridBuilder`, `estimator.setEpochs(5)`.

**Whose is it?** A gang's settings say how ranks are started: `tr.launch` takes them, too, and no others of this page.
An estimator's say what is trained, on which columns. An estimator takes both as keywords; `gang=tr.Gang(…)` gives all
of a gang's at once.
"""
GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "Data": (
        "Which columns, and what their values become.",
        {
            "feature_cols": "feature_cols=['hour', 'temperature']",
            "label_cols": "label_cols=['rented']",
            "weight_col": "weight_col='importance'",
            "init_score_col": "init_score_col='last_years_score'",
            "normalize": "normalize=True",
            "nulls": "nulls={'age': 0}",
            "nan": "nan='keep'",
            "on_error": "on_error='skip'",
            "vocabulary": "vocabulary=['city']",
            "unknown_words": "unknown_words='keep'",
            "hash_buckets": "hash_buckets={'city': 1000}",
            "categorical_features": "categorical_features=['weekday']",
            "pad": "pad={'tokens': 128}",
            "decode": "decode={'image': read_image}",
            "decode_threads": "decode_threads=4",
            "transform": "transform=scale_images",
            "feature_dtype": "feature_dtype='float64'",
            "batch_form": "batch_form='dict'",
        },
    ),
    "Model": (
        "What is trained, and what its predictions mean.",
        {
            "model": "model=make_net",
            "initial_weights": "initial_weights='models/yesterday'",
            "task": "task='classification'",
            "backend": "backend='jax'",
            "custom_objects": "custom_objects={'MyLayer': MyLayer}",
            "train": "train=train_on_a_rank",
            "predict": "predict=predict_a_batch",
            "scores": "scores=True",
            "config": "config={'rate': 0.1}",
        },
    ),
    "Training": (
        "How it is trained.",
        {
            "loss": "loss=torch.nn.MSELoss()",
            "loss_weights": "loss_weights={'price': 1.0, 'sold': 0.1}",
            "optimizer": "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)",
            "lr_scheduler": "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)",
            "epochs": "epochs=5",
            "batch_size": "batch_size=256",
            "global_batch_size": "global_batch_size=1024",
            "remainder": "remainder='drop'",
            "shuffle": "shuffle='stream'",
            "seed": "seed=7",
            "train_step": "train_step=adversarial_step",
            "gradient_accumulation": "gradient_accumulation=4",
            "clip_grad_norm": "clip_grad_norm=1.0",
            "precision": "precision='bf16'",
            "strategy": "strategy='fsdp'",
            "equal_weights": "equal_weights=False",
            "ddp_options": "ddp_options={'bucket_cap_mb': 50}",
            "compile": "compile=True",
            "jit_compile": "jit_compile=False",
            "run_eagerly": "run_eagerly=True",
            "trainer_args": "trainer_args={'precision': 'bf16-mixed'}",
            "check": "check='off'",
            "verbose": "verbose=False",
        },
    ),
    "Trees": (
        "What only the LightGBM estimators have.",
        {
            "num_iterations": "num_iterations=200",
            "learning_rate": "learning_rate=0.05",
            "num_leaves": "num_leaves=63",
            "max_depth": "max_depth=8",
            "min_data_in_leaf": "min_data_in_leaf=50",
            "feature_fraction": "feature_fraction=0.8",
            "bagging_fraction": "bagging_fraction=0.8",
            "bagging_freq": "bagging_freq=1",
            "lambda_l1": "lambda_l1=0.1",
            "lambda_l2": "lambda_l2=1.0",
            "max_bin": "max_bin=127",
            "boosting": "boosting='dart'",
            "objective": "objective='poisson'",
            "num_class": "num_class=3",
            "group_col": "group_col='query'",
            "eval_at": "eval_at=[1, 5, 10]",
            "tree_learner": "tree_learner='voting'",
            "monotone_constraints": "monotone_constraints={'age': 1}",
            "native_params": "native_params={'min_gain_to_split': 0.1}",
        },
    ),
    "Validation": (
        "What is measured beside the training, and what it decides.",
        {
            "validation": "validation=0.1",
            "validation_group": "validation_group='patient'",
            "row_key": "row_key='id'",
            "metrics": "metrics={'error': mean_absolute_error}",
            "training_metric": "training_metric=True",
            "eval_step": "eval_step=step_without_noise",
            "early_stopping": "early_stopping=3",
            "callbacks": "callbacks=[Freeze()]",
        },
    ),
    "Recovery": (
        "What happens after a loss, and where a training continues.",
        {
            "retries": "retries=5",
            "run_dir": "run_dir='s3://models/bikes/run-1'",
            "persist": "persist=True",
            "checkpoint_every": "checkpoint_every='1min'",
            "checkpoint_keep": "checkpoint_keep=3",
            "if_data_changed": "if_data_changed='restart'",
            "if_code_changed": "if_code_changed='continue'",
            "start_timeout": "start_timeout=120.0",
            "replacement_timeout": "replacement_timeout=120.0",
            "max_runtime": "max_runtime=14400.0",
            "stall_timeout": "stall_timeout=300.0",
            "on_stall": "on_stall='report'",
        },
    ),
    "Ranks": (
        "How many ranks there are, and what each has.",
        {
            "ranks": "ranks=4",
            "cpus": "cpus=8",
            "gpus": "gpus=1",
            "accelerator": "accelerator='npu'",
            "gpu_type": "gpu_type='H100'",
            "mixed": "mixed='allow'",
            "env": "env={'OMP_NUM_THREADS': '4'}",
            "framework": "framework='jax'",
            "on": "on='driver'",
            "env_packages": "env_packages=['torch==2.13.0', './dist/ours-1.0-py3-none-any.whl']",
            "py_files": "py_files=['ours.zip']",
            "output": "output='rank 0'",
            "logs": "logs='json'",
            "progress": "progress=False",
            "ui": "ui=True",
            "tls": "tls=True",
            "trace": "trace='torch'",
        },
    ),
    "Predictions": (
        "What the trained model adds to a DataFrame. Each is a `Param` of the model, too.",
        {
            "prediction_col": "prediction_col='rented_tomorrow'",
            "probability_col": "probability_col='chances'",
            "raw_prediction_col": "raw_prediction_col=''",
            "prediction_label_col": "prediction_label_col='answer'",
            "label_index_col": "label_index_col='label_index'",
            "error_col": "error_col='why_not'",
            "prediction_batch_size": "prediction_batch_size=4096",
            "prediction_device": "prediction_device='cuda'",
        },
    ),
}


def page() -> str:
    """Return the text of the page."""
    named = [name for _, examples in GROUPS.values() for name in examples]
    fields = {field.name for source in SOURCES.values() for field in own_fields(source)}
    if wrong := sorted(fields ^ set(named)) or sorted({name for name in named if named.count(name) > 1}):
        raise SystemExit(f"GROUPS must have every setting once: {', '.join(wrong)}")
    parts = [HEAD]
    for title, (about, examples) in GROUPS.items():
        links = " · ".join(f"[`{name}`](#{name})" for name in examples)
        parts.append(f"## {title} {{ #group-{title.lower()} }}\n\n{about}\n\n{links}\n")
        parts += [entry(name, example) for name, example in examples.items()]
        if "early_stopping" in examples:
            parts.append(table(EarlyStopping))
    return "\n".join(parts)


def table(source: type) -> str:
    """Return the fields of a small settings class."""
    rows = [f"| `{field.name}` | {default(field)} | {text(field)} |" for field in dataclasses.fields(source)]
    return "\n".join([f"### `{source.__name__}`", "", "| field | | |", "|---|---|---|", *rows, ""])


def entry(name: str, example: str) -> str:
    """Return a setting's part of the page: the same text once for all that have it, another one under their names."""
    owners: dict[tuple[str, str, str], list[str]] = {}
    for owner, source in SOURCES.items():
        for field in own_fields(source):
            if field.name == name:
                owners.setdefault((shown_type(field), default(field), text(field)), []).append(owner)
    lines = [f"### `{name}` {{ #{name} }}", ""]
    for (kind, value, meaning), names in owners.items():
        every = "every estimator" if names == list(ESTIMATORS) else ", ".join(names)
        whose = f"*{'gang' if names == ['Gang'] else every}*"
        lines += [" · ".join(filter(None, [whose, kind, value])), "", meaning, ""]
    return "\n".join([*lines, "```py", example, "```", ""])


def own_fields(source: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a source; of a kind of LightGBM estimator those that it has beside the shared ones."""
    shared = {field.name for field in dataclasses.fields(LightGBMSettings)} if source in KINDS else set()
    return [field for field in dataclasses.fields(source) if field.name not in shared]


def shown_type(field: dataclasses.Field[Any]) -> str:
    """Return a field's annotation as Markdown; nothing where only its text says what it may be."""
    alias = getattr(tritium.gang.settings, str(field.type), field.type)
    return "" if alias is Any else f"`{str(alias).replace('typing.', '')}`"


def default(field: dataclasses.Field[Any]) -> str:
    """Return what holds where the setting is not given."""
    if field.default_factory is not dataclasses.MISSING:
        return f"default `{field.default_factory()!r}`"
    return "required" if field.default is dataclasses.MISSING else f"default `{field.default!r}`"


def text(field: dataclasses.Field[Any]) -> str:
    """Return a field's documentation as Markdown."""
    return str(field.metadata["doc"]).replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
