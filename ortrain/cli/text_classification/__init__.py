"""Fine-tuning a Hugging Face text classifier, from files on disk to files on disk.

``job.run`` is the whole of it, in this order: ``examples`` reads and checks the files,
``classifier`` loads the model, and has ``weights`` and ``vocabulary`` see to it that its files
belong together, ``batches`` turns text into tensors in an order that only the seed decides,
``fine_tuning`` trains and evaluates, ``deploy.export_onnx`` and ``report`` write what is left
behind, and ``output`` sees to it that a directory is either complete or not there.
"""
