from examples._cli import start
from examples.language_modeling.main import main

start(main)
