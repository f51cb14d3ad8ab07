"""The public examples that `horovod_examples.py` runs, and the lines that are replaced in each.

`{data}` stands for the folder of generated data, `{work}` for the working directory of an example.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NPZ = (
    "(lambda f: ((f['x_train'], f['y_train']), (f['x_test'], f['y_test'])))"
    "(__import__('numpy').load('{data}/mnist.npz'))"
)
"""In place of a download by Keras, which checks a hash."""
LEGACY_KERAS = {"TF_USE_LEGACY_KERAS": "1"}
"""Keras 2, by the package tf_keras, whose API these examples were written for."""


@dataclass(frozen=True)
class Example:
    """How an example is run, and what is replaced in it."""

    path: str
    arguments: str = ""
    ranks: bool = True
    """Whether the script itself runs in 2 ranks (`tritium run --compat`), or starts them (`import tritium.compat`)."""
    data: tuple[tuple[str, str], ...] = ()
    """What is replaced where data would be downloaded: old and new text of a line."""
    shorter: tuple[tuple[str, str], ...] = ()
    """What is replaced so that it takes minutes on two cores, or runs on 2 ranks."""
    today: tuple[tuple[str, str], ...] = ()
    """What is replaced because today's TensorFlow, Keras or Lightning has it no longer, or Python itself."""
    env: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages that Tritium does not bring."""
    shows: str = ""
    """A pattern of what it prints at its end; it must be found."""
    options: str = ""
    """Of `tritium run`."""
    limit: int = 900


_MNIST_RANK = (("tf.keras.datasets.mnist.load_data(path='mnist-%d.npz' % hvd.rank())", NPZ),)
_LIBSVM = (("mnist_dir = get_mnist_dir()", "mnist_dir = '{data}/mnist.bz2'"),)
_MNIST = (("mnist.load_data()", NPZ),)
_TF1_CONFIG = (
    ("config = tf.ConfigProto()", "pass"),
    ("config.gpu_options.allow_growth = True", "pass"),
    ("K.set_session(tf.Session(config=config))", "pass"),
)
_TF1_SESSION = (*_TF1_CONFIG, ("config.gpu_options.visible_device_list = str(hvd.local_rank())", "pass"))
_TF1_ROSSMANN = (
    ("config = tf.ConfigProto(device_count={'GPU': 0})", "pass"),
    ("config.inter_op_parallelism_threads = 1", "pass"),
    ("config.intra_op_parallelism_threads = 1", "pass"),
    ("tf.log(max_sales)", "tf.math.log(float(max_sales))"),
    ("tf.log(x.Sales)", "tf.math.log(tf.cast(x.Sales, 'float32'))"),
    ("h5py.File(bio)", "h5py.File(bio, 'a')"),
    ("Adam(lr=", "Adam(learning_rate="),
    ("[[row[col]] for col in all_cols]", "[tf.constant([[row[col]]]) for col in all_cols]"),
    ("math.exp(log_sales)", "math.exp(log_sales.item())"),  # NumPy 2
    # tf_keras 2.21 writes a function that is an activation to HDF5, and does not read it
    (
        "CUSTOM_OBJECTS = {",
        "Scaled = type('Scaled', (tf.keras.layers.Layer,), {'call': lambda self, x: act_sigmoid_scaled(x)}); "
        "CUSTOM_OBJECTS = {'Scaled': Scaled, ",
    ),
    ("Dense(1, activation=act_sigmoid_scaled)(x)", "Scaled()(Dense(1)(x))"),
)
_TINY = "--batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2 --no-cuda"
_SPARK = "--num-proc 2 --epochs 2 --work-dir {work}/store --data-dir {data}"
_ROSSMANN = "--num-proc 2 --epochs 2 --data-dir file://{rossmann}"

HOROVOD = (
    Example(
        "examples/pytorch/pytorch_mnist.py",
        "--epochs 2 --no-cuda --data-dir {data}/torchvision",
        needs=("torchvision",),
        shows=r"Accuracy: [\d.]+%",
    ),
    Example(
        "examples/pytorch/pytorch_synthetic_benchmark.py",
        f"--model resnet18 {_TINY}",
        needs=("torchvision",),
        shows=r"Total img/sec on 2 CPU\(s\): [\d.]+",
    ),
    Example(
        "examples/pytorch/pytorch_imagenet_resnet50.py",
        "--train-dir {data}/pictures/train --val-dir {data}/pictures/validation --epochs 1 --batch-size 2 "
        "--val-batch-size 2 --no-cuda",
        needs=("torchvision", "tqdm", "tensorboard"),
        shows=r"Validate Epoch\s+#1: 100%",
    ),
    Example(
        "examples/pytorch/pytorch_lightning_mnist.py",
        "--epochs 2 --no-cuda --data-dir {data}/torchvision",
        needs=("torchvision", "pytorch_lightning", "tensorboard"),
        today=(
            ("accelerator='horovod',", ""),
            ("gpus=(1 if args.cuda else 0),", "use_distributed_sampler=False,"),
            ("def validation_epoch_end(self, outputs):", "def unused(self, outputs):"),
            ("assert self.epcoh_end_counter == 2 * epochs", "pass"),
        ),
        options="--framework lightning",
        shows=r"Accuracy: [\d.]+%",
    ),
    Example(
        "examples/elastic/pytorch/pytorch_mnist_elastic.py",
        "--epochs 1 --no-cuda --data-dir {data}/torchvision",
        needs=("torchvision",),
        shows=r"Accuracy: [\d.]+%",
    ),
    Example(
        "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py",
        f"--model resnet18 {_TINY}",
        needs=("torchvision",),
        shows=r"Total img/sec on 2 CPU\(s\): [\d.]+",
    ),
    Example(
        "examples/elastic/pytorch/pytorch_imagenet_resnet50_elastic.py",
        "--train-dir {data}/pictures/train --val-dir {data}/pictures/validation --epochs 1 --batch-size 2 "
        "--val-batch-size 2 --no-cuda",
        needs=("torchvision", "tqdm", "tensorboard"),
        shows=r"Validate Epoch\s+#1: 100%",
    ),
    Example("examples/adasum/adasum_small_model.py", "--op Adasum", shows=r"1\.0 Adasum 0\.1 2 \d+"),
    Example("examples/keras/keras_mnist.py", data=_MNIST, today=_TF1_SESSION, shows=r"Test accuracy: [\d.]+"),
    Example(
        "examples/keras/keras_mnist_advanced.py",
        "--epochs 2",
        data=_MNIST,
        today=(
            *_TF1_SESSION,
            (
                "from keras.preprocessing.image import ImageDataGenerator",
                "from keras.src.legacy.preprocessing.image import ImageDataGenerator",
            ),
            ("keras.optimizers.Adadelta(lr=scaled_lr)", "keras.optimizers.Adadelta(learning_rate=scaled_lr)"),
            ("model.fit_generator(", "model.fit("),
        ),
        needs=("scipy",),
        shows=r"Test accuracy: [\d.]+",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_keras_mnist.py",
        data=_MNIST_RANK,
        shorter=(("steps_per_epoch=500 // hvd.size(),", "steps_per_epoch=2,"),),
        env=LEGACY_KERAS,
        shows=r"Epoch 24/24",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_mnist.py",
        data=_MNIST_RANK,
        shorter=(("dataset.take(10000 // hvd.size())", "dataset.take(60 // hvd.size())"),),
        env=LEGACY_KERAS,
        shows=r"Step #20\tLoss: [\d.]+",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_synthetic_benchmark.py",
        f"--model MobileNetV2 {_TINY}",
        env=LEGACY_KERAS,
        shows=r"Total img/sec on 2 CPU\(s\): [\d.]+",
    ),
    Example(
        "examples/tensorflow2/tensorflow2_keras_synthetic_benchmark.py",
        "--model MobileNetV2 --batch-size 2 --num-batches-per-iter 1 --num-iters 3 --no-cuda",
        env=LEGACY_KERAS,
        shows=r"Total img/sec on 2 CPU\(s\): [\d.]+",
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py",
        data=_MNIST_RANK,
        shorter=(("steps_per_epoch=500 // hvd.size(),", "steps_per_epoch=2,"),),
        env=LEGACY_KERAS,
        shows=r"Epoch 24/24",
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py",
        data=_MNIST_RANK,
        env=LEGACY_KERAS,
        shows=r"Step #20\tLoss: [\d.]+",
    ),
    Example(
        "examples/elastic/tensorflow2/tensorflow2_synthetic_benchmark_elastic.py",
        f"--model MobileNetV2 {_TINY}",
        env=LEGACY_KERAS,
        shows=r"Total img/sec on 2 CPU\(s\): [\d.]+",
    ),
    Example("examples/spark/pytorch/pytorch_spark_mnist.py", _SPARK, ranks=False, shows=r"Test accuracy: [\d.]+"),
    Example(
        "examples/spark/pytorch/pytorch_lightning_spark_mnist.py",
        _SPARK,
        ranks=False,
        # Today PyTorch's compiler has to be loaded before TensorFlow.
        today=(("    import tensorflow as tf\n", "    import pytorch_lightning, tensorflow as tf\n"),),
        shows=r"Test accuracy: [\d.]+",
    ),
    Example("examples/spark/keras/keras_spark_mnist.py", _SPARK, ranks=False, shows=r"Test accuracy: [\d.]+"),
    Example(
        "examples/spark/keras/keras_spark_rossmann_run.py",
        f"{_ROSSMANN} --processing-master local[2] --training-master local[2]",
        ranks=False,
        today=(*_TF1_SESSION, *_TF1_ROSSMANN),
        env=LEGACY_KERAS,
        shows=r"Saved predictions",
    ),
    Example(
        "examples/spark/keras/keras_spark_rossmann_estimator.py",
        f"{_ROSSMANN} --work-dir {{work}}/store",
        ranks=False,
        today=(("lr=args.learning_rate", "learning_rate=args.learning_rate"),),
        shows=r"Saved predictions",
    ),
    Example(
        "examples/spark/keras/keras_spark3_rossmann.py",
        f"{_ROSSMANN} --processing-master local[2] --training-master local[2]",
        ranks=False,
        today=(
            *_TF1_CONFIG,
            *_TF1_ROSSMANN,
            ("config.gpu_options.visible_device_list = get_available_devices()[0]", "pass"),
            ("config.gpu_options.visible_device_list = TaskContext.get().resources()['gpu'].addresses[0]", "pass"),
        ),
        shorter=(("conf = set_gpu_conf(conf)", "pass"),),
        env=LEGACY_KERAS,
        shows=r"Saved predictions",
    ),
)
PETASTORM = (
    Example(
        "examples/mnist/generate_petastorm_mnist.py",
        "-d {data}/petastorm -o file://{shared}/petastorm -m local[2]",
        ranks=False,
        needs=("torchvision",),
    ),
    Example(
        "examples/mnist/pytorch_example.py",
        "--dataset-url file://{shared}/petastorm --epochs 1 --no-cuda",
        ranks=False,
        needs=("torchvision",),
        shows=r"Accuracy: \d+/\d+",
    ),
    Example(
        "examples/mnist/tf_example.py",
        "--dataset-url file://{shared}/petastorm --training-iterations 30",
        ranks=False,
        today=(("import tensorflow.compat.v1 as tf", "import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()"),),
        shows=r"the accuracy of the model is: [\d.]+",
    ),
    Example("examples/spark_dataset_converter/pytorch_converter_example.py", ranks=False, data=_LIBSVM),
    Example("examples/spark_dataset_converter/tensorflow_converter_example.py", ranks=False, data=_LIBSVM),
)
ECOSYSTEM = (
    Example(
        "spark/spark-tensorflow-distributor/examples/simple/example.py",
        ranks=False,
        data=(("tf.keras.datasets.mnist.load_data(path=str(uuid.uuid4())+'mnist.npz')", NPZ),),
        shorter=(("MirroredStrategyRunner(num_slots=8)", "MirroredStrategyRunner(num_slots=2, use_gpu=False)"),),
        env={"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell", **LEGACY_KERAS},
        shows=r"",
    ),
)
