"""The network for Rossmann's sales in Keras 3: an embedding for each categorical column, and four dense layers.

It predicts the logarithm of a day's sales, as a sigmoid of which the top is 1.2 times that of the best day.
"""

import math

import keras
from features import CATEGORICAL, CONTINUOUS

HIDDEN = (1000, 1000, 1000, 500)


def make_model(vocabulary, max_sales, hidden=HIDDEN):
    """Return the network. Each column is an input by its name, [batch, 1], in the order of CATEGORICAL + CONTINUOUS.

    vocabulary : categorical column -> its words, of which the input is the index; one more is for any other word.
    """
    layers, small = keras.layers, keras.regularizers.L2(0.00005)
    inputs = {name: keras.Input((1,), name=name, dtype="int32") for name in CATEGORICAL}
    inputs |= {name: keras.Input((1,), name=name) for name in CONTINUOUS}
    embeddings = [layers.Embedding(len(vocabulary[name]) + 1, 10)(inputs[name]) for name in CATEGORICAL]
    numbers = layers.BatchNormalization()(layers.Concatenate()([inputs[name] for name in CONTINUOUS]))
    x = layers.Concatenate()([layers.Flatten()(layers.Concatenate()(embeddings)), numbers])
    for width in hidden:
        x = layers.Dense(width, "relu", kernel_regularizer=small)(x)
    x = layers.Dropout(0.5)(x)
    return keras.Model(list(inputs.values()), layers.Dense(1, scaled_sigmoid(max_sales), name="Sales")(x))


def scaled_sigmoid(max_sales):
    """Return the activation of the last layer."""
    top = 1.2 * math.log(max_sales)

    def act_sigmoid_scaled(x):
        return keras.ops.sigmoid(x) * top

    return act_sigmoid_scaled


def exp_rmspe(y_true, y_pred):
    """Return the competition's error of a batch, of logarithms: the root of the mean square of relative errors."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(keras.ops.expm1(y_pred - y_true))))


class ExpRMSPE(keras.metrics.Mean):
    """The same over all rows: `exp_rmspe` as a function becomes a mean over batches."""

    def __init__(self, name="exp_rmspe", **options):
        super().__init__(name=name, **options)

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.square(keras.ops.expm1(y_pred - y_true)), sample_weight)

    def result(self):
        return keras.ops.sqrt(super().result())
