"""Train a small transformer on the texts of a DataFrame, data-parallel on two ranks; nothing is downloaded."""

import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the ranks' Python is this one

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr

WORDS = ["[PAD]", "[UNK]", "the", "film", "was", "not", "good", "bad"]
TEXTS = [("the film was good", 1), ("the film was bad", 0), ("good", 1), ("not good", 0), ("bad film", 0)]


def train(output_dir):
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

    def collate(rows):  # rows are dicts: bytes and tensors
        found = tokenizer([row["text"].decode() for row in rows], padding=True, return_tensors="pt")
        inputs = {name: found[name] for name in ("input_ids", "attention_mask")}
        return {**inputs, "labels": torch.stack([row["label"] for row in rows])}

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=len(WORDS), **sizes))
    arguments = transformers.TrainingArguments(
        output_dir,
        num_train_epochs=8,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        remove_unused_columns=False,  # the collator reads "text"
        save_strategy="no",
        report_to="none",
    )
    dataset = tr.world().shard("train").dataset()  # single rows: Trainer makes the batches
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset, data_collator=collate)
    trainer.train()
    return arguments.world_size, trainer.evaluate(dataset)["eval_loss"]


if __name__ == "__main__":
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    df = spark.createDataFrame(TEXTS * 40, ["text", "label"])
    df = df.select(F.col("text").cast("binary").alias("text"), "label")  # strings travel as bytes
    with tempfile.TemporaryDirectory() as output_dir:
        found = tr.launch(train, ranks=2, args=(output_dir,), framework="huggingface", data={"train": df})
    assert [size for size, _ in found] == [2, 2]
    assert found[0][1] < 0.1, found
    spark.stop()
