from examples._cli import start
from examples.preference_optimization.main import main

start(main)
