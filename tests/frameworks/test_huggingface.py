"""Hugging Face in a gang: Trainer and Accelerator use every row of a shard, and text goes through a tokenizer."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadSetting

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
FRAME = pd.DataFrame({"row": np.arange(96), "label": np.arange(96) % 2})
WORDS = ["[PAD]", "[UNK]", "good", "bad", "very", "not"]


def run(fn: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    quiet = {"on": "driver", "progress": False, "output": "none", "retries": 0, "framework": "huggingface"}
    return tr.launch(fn, ranks=ranks, **{**quiet, **settings})


@pytest.mark.parametrize("framework", ["huggingface", "torch"])
def test_every_row_is_used_once_an_epoch_over_both_ranks(framework: str, tmp_path: Path) -> None:
    def train() -> dict[str, Any]:
        import accelerate
        import torch
        import transformers

        shard, seen = tr.world().shard("train"), {"trainer": [], "accelerator": []}

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))

            def forward(self, row: Any, labels: Any = None) -> dict[str, Any]:
                seen["trainer"].append(row.tolist())
                return {"loss": (self.weight * row.float()).mean()}

        arguments = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=2,
            per_device_train_batch_size=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,  # framework="huggingface" says so by itself, of which the contract is the test
        )
        trainer = transformers.Trainer(Model(), arguments, train_dataset=shard.dataset())
        trainer.train()

        accelerator = accelerate.Accelerator()
        model = torch.nn.Linear(1, 1)
        model, loader = accelerator.prepare(model, shard.loader(batch_size=10))
        for _ in range(2):
            seen["accelerator"].append([row for batch in loader for row in batch["row"].tolist()])
        steps = trainer.state.global_step
        return {"steps": steps, "size": accelerator.num_processes, "length": len(loader), "seen": seen}

    found = run(train, data={"train": FRAME}, framework=framework)
    assert [(each["steps"], each["size"], each["length"]) for each in found] == [(10, 2, 5)] * 2
    for epoch in range(2):
        batches = [batch for each in found for batch in each["seen"]["trainer"][5 * epoch : 5 * epoch + 5]]
        assert sorted(row for batch in batches for row in batch) == list(range(96))
        assert sorted(row for each in found for row in each["seen"]["accelerator"][epoch]) == list(range(96))


def test_what_would_use_a_part_of_the_rows_is_refused() -> None:
    def train() -> list[str]:
        import accelerate
        import torch

        shard, errors = tr.world().shard("train"), []
        for split in ({"dispatch_batches": True}, {"split_batches": True}):
            configuration = accelerate.DataLoaderConfiguration(**split)
            accelerator = accelerate.Accelerator(dataloader_config=configuration)
            try:
                accelerator.prepare(shard.loader(batch_size=10))
            except tr.errors.BadSetting as error:
                errors.append(str(error))
        try:
            next(iter(torch.utils.data.DataLoader(shard.dataset(), batch_size=2, num_workers=2)))
        except tr.errors.BadSetting as error:
            errors.append(str(error))
        return errors

    for errors in run(train, data={"train": FRAME}):
        assert "dispatch_batches=True splits the batches of one rank" in errors[0]
        assert "split_batches=True" in errors[1]
        assert "can't be read by workers of a DataLoader" in errors[2]


def test_ranks_that_accelerate_does_not_connect_are_refused() -> None:
    def train() -> None:
        import accelerate

        accelerate.Accelerator()

    with pytest.raises(BadSetting, match=r"found 1 process, and this gang has 2 ranks.*framework=\"huggingface\""):
        run(train, framework="torch")


def test_text_of_a_dataframe_goes_through_a_tokenizer_of_a_local_vocabulary(tmp_path: Path) -> None:
    """And a model made from a configuration; nothing is downloaded. A retry resumes from Trainer's checkpoint."""
    texts = ["very good", "not good", "bad", "not very bad"] * 8
    frame = pd.DataFrame({"text": [text.encode() for text in texts], "label": [1, 0, 0, 1] * 8})

    def train() -> dict[str, Any]:
        import torch
        import transformers
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

        class Killed(transformers.TrainerCallback):
            def on_epoch_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
                begun.append(int(state.epoch))
                if state.epoch == 3 and tr.world().rank == 1 and not tmp_path.joinpath("killed").exists():
                    tmp_path.joinpath("killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        begun: list[int] = []

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            found = tokenizer([row["text"].decode() for row in rows], padding=True, return_tensors="pt")
            inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
            return {**inputs, "labels": torch.stack([row["label"] for row in rows])}

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        configuration = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=8, **sizes, **dropout)
        model = transformers.BertForSequenceClassification(configuration)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=20,
            learning_rate=0.02,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="epoch",
            save_total_limit=1,
            disable_tqdm=True,
        )
        data = {"train_dataset": tr.world().shard("train").dataset(), "data_collator": collate}
        trainer = transformers.Trainer(model, arguments, callbacks=[Killed()], **data)
        last = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
        trainer.train(resume_from_checkpoint=last)
        scores = trainer.evaluate(tr.world().shard("train").dataset(shuffle=False))
        return {"offline": os.environ["HF_HUB_OFFLINE"], "begun": begun, "after": scores["eval_loss"]}

    found = run(train, data={"train": frame}, retries=1)
    assert tmp_path.joinpath("killed").exists()
    assert [each["begun"] for each in found] == [list(range(found[0]["begun"][0], 20))] * 2
    assert found[0]["begun"][0] in (2, 3)  # rank 0 may have been killed while it saved
    assert [each["offline"] for each in found] == ["1", "1"]
    assert found[0]["after"] == pytest.approx(found[1]["after"])
    assert found[0]["after"] < 0.1


def test_a_gang_of_one_trains_alone() -> None:
    def train() -> tuple[int, int]:
        import accelerate

        accelerator = accelerate.Accelerator(cpu=True)
        loader = accelerator.prepare(tr.world().shard("train").loader(batch_size=10))
        return accelerator.num_processes, sum(len(batch["row"]) for batch in loader)

    assert run(train, 1, data={"train": FRAME}) == [(1, 96)]
