from examples._cli import start
from examples.classification_regression.main import main

start(main)
