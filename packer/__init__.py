"""Pack folders of small files into WebDataset shards that every reader accepts.

`import packer` is light: it loads neither torch nor Pillow. The command line is `packer`,
the same things from Python are:

    from packer.pack import PackOptions, pack
    result = pack("/data/imagenet", "out/", PackOptions(shard_bytes=512 << 20))
"""

__version__ = "0.1.0"
