"""The record formats: TensorProtos (Caffe2) and Datum (Caffe)."""
