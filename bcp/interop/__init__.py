"""Names and layouts of models as other libraries have them."""
