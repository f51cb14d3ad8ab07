"""Fine-tune a BERT of Hugging Face's on a DataFrame, and score with it in Spark: from a directory, without a download.

Data: docstrings of Python's own library. The model is to tell which package a docstring is from.
"""

import ast
import os
import re
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

import numpy as np
import pandas as pd
import torch
import transformers
from matplotlib.figure import Figure
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import tritium as tr

SMALL = "EXAMPLE_SMALL" in os.environ  # the tests' size
PACKAGES = ["asyncio", "email", "logging", "unittest", "xml"]
LENGTH = 48  # tokens that are read of a text


def docstrings():
    """Return the docstrings of the packages: `text`, and `label`, an index into PACKAGES."""
    rows, library = set(), Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        for path in (library / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            nodes = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))
            texts = (ast.get_docstring(node) or "" for node in nodes)
            rows |= {(re.sub(package, "", text), label) for text in texts if len(text.split()) >= 4}
    return pd.DataFrame(sorted(rows), columns=["text", "label"])


def save_checkpoint(folder, texts):
    """Write what from_pretrained reads: a tokenizer, and a small BERT made from a config, with random weights."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    pieces = {"vocab_size": 3000, "special_tokens": ["[PAD]", "[UNK]", "[CLS]"]}
    words.train_from_iterator(texts, trainers.WordPieceTrainer(**pieces))
    transformers.set_seed(0)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    transformers.BertModel(transformers.BertConfig(vocab_size=words.get_vocab_size(), **sizes)).save_pretrained(folder)


class Classifier(torch.nn.Module):
    """What Spark scores with: tokens [batch, LENGTH] in, scores [batch, packages] out."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, text):
        return self.bert(input_ids=text, attention_mask=(text != 0).long()).logits


def train(checkpoint, output):
    transformers.set_seed(0)
    bert = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=len(PACKAGES))
    shard = tr.world().shard("train")
    options = {"remove_unused_columns": False, "save_strategy": "no", "report_to": "none"}  # the collator reads "text"
    arguments = transformers.TrainingArguments(
        output, num_train_epochs=10, per_device_train_batch_size=16, learning_rate=1e-3, **options
    )

    def collate(rows):
        tokens, labels = (torch.as_tensor(np.stack([row[name] for row in rows])) for name in ("text", "label"))
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}

    transformers.Trainer(bert, arguments, train_dataset=shard.dataset(), data_collator=collate).train()
    return tr.Model(Classifier(bert), example=shard, inputs=["text"], task="classification")


def main():
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    rows = docstrings().sample(frac=0.5 if SMALL else 1, random_state=0)
    rows["held_out"] = np.arange(len(rows)) % 5 == 0
    checkpoint = os.path.abspath("checkpoint")  # or the name of a model, where downloads are allowed
    save_checkpoint(checkpoint, rows.text[~rows.held_out])
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    def tokenize(text):
        return np.array(tokenizer(text, truncation=True, padding="max_length", max_length=LENGTH)["input_ids"])

    table = spark.createDataFrame(rows)
    data = tr.Data(table.where("NOT held_out").select("text", "label"), decode={"text": tokenize})
    arguments = (checkpoint, os.path.abspath("trainer"))
    model, *_ = tr.launch(train, ranks=2, args=arguments, framework="huggingface", data={"train": data})

    scored = model.transform(table.where("held_out").select("text", F.col("label").cast("double"))).cache()
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(scored)
    baseline = rows.label[rows.held_out].value_counts(normalize=True).max()
    print(f"most frequent package: {baseline:.1%} of {scored.count()} held-out docstrings are right")
    print(f"BERT on two ranks: {accuracy:.1%}")
    assert accuracy > baseline + 0.1

    right = scored.groupBy("label").agg(F.avg((F.col("label") == F.col("prediction")).cast("int"))).orderBy("label")
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(PACKAGES, [share for _, share in right.collect()], color="teal")
    axes.axvline(baseline, color="grey", linestyle="--")
    axes.set(title="Held-out docstrings put into their package", xlabel="share (dashed: the baseline)", xlim=(0, 1))
    figure.savefig("fine_tuning.png", dpi=100)
    print("picture: fine_tuning.png")
    spark.stop()


if __name__ == "__main__":
    main()
