"""This part has the layers that hold a recipe: Linear and the pieces of a decoder around it."""
