"""CT slices and volumes: DICOM, NIfTI, MetaImage, arrays and exported pictures, correct to the Hounsfield unit."""
