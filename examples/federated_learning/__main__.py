from examples._cli import start
from examples.federated_learning.main import main

start(main)
