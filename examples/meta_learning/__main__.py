from examples._cli import start
from examples.meta_learning.main import main

start(main)
