"""Where samples come from: folders of files, CT series, packed datasets."""
